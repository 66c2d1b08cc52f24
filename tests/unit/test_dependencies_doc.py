"""docs/dependencies.md names every direct dependency, and the lock pins it."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _direct_dependencies() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        requirements += extra
    return {re.split(r"[\[<>=~! ]", requirement)[0].lower() for requirement in requirements}


def test_every_direct_dependency_has_its_reason_and_no_reason_is_left_over() -> None:
    rows = re.findall(
        r"^\| ([A-Za-z0-9_.-]+) \| (.+) \|$",
        (ROOT / "docs/dependencies.md").read_text(),
        re.MULTILINE,
    )
    reasons = {name.lower(): why for name, why in rows if name != "package"}
    assert reasons.keys() == _direct_dependencies()
    assert all(len(why) > 10 for why in reasons.values())


def test_every_direct_dependency_is_pinned_to_one_version() -> None:
    lock = (ROOT / "requirements.lock").read_text().splitlines()
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lock if "==" in line}
    assert {name.replace("_", "-") for name in _direct_dependencies()} <= pinned
    assert "torch==2.13.0" in lock
