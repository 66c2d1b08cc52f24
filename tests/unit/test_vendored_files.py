"""Vendored files are those of the versions that web/vendor.lock.json names."""

import hashlib
import json
from pathlib import Path

WEB = Path(__file__).resolve().parents[2] / "web"
VENDOR = WEB / "static" / "vendor"


def test_every_vendored_file_is_locked_and_unchanged() -> None:
    lock = json.loads((WEB / "vendor.lock.json").read_text())
    locked = {
        f"{folder}/{name}": digest
        for folder, entry in lock.items()
        for name, digest in entry["files"].items()
    }
    found = {
        file.relative_to(VENDOR).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in VENDOR.rglob("*")
        if file.is_file()
    }
    assert found == locked


def test_every_vendored_package_names_version_source_and_license() -> None:
    lock = json.loads((WEB / "vendor.lock.json").read_text())
    for folder, entry in lock.items():
        assert entry["version"] in entry["source"], folder
        assert entry["license"], folder
        assert any(name.startswith("LICENSE") for name in entry["files"]), folder
