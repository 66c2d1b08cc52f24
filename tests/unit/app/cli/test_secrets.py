"""`loramux secrets`: from a rotation to the end of the old version."""

import json
import os

from app.crypto import FileSource
from app.settings import Settings
from tests.unit.app.cli.conftest import Run


def versions(run: Run) -> list[dict[str, object]]:
    listed: list[dict[str, object]] = json.loads(run("secrets", "list", "--json").stdout)
    return listed


def test_a_version_is_dropped_once_nothing_depends_on_it(run: Run, settings: Settings) -> None:
    run("tenants", "create", "acme")
    key = json.loads(run("keys", "create", "--tenant", "acme", "--json").stdout)
    assert run("secrets", "rotate").exit_code == 0
    source = FileSource(settings.root_secret_file)
    early = run("secrets", "drop", "1")
    assert early.exit_code == 1
    assert "a moment ago" in early.stderr
    os.utime(source.path, (0, 0))
    assert versions(run) == [
        {"version": 2, "signs": True, "depend": 0},
        {"version": 1, "signs": False, "depend": 1},
    ]
    refused = run("secrets", "drop", "1")
    assert refused.exit_code == 1
    assert "depend on version 1" in refused.stderr
    run("keys", "revoke", key["id"])
    assert run("secrets", "drop", "1").exit_code == 0
    assert [entry["version"] for entry in versions(run)] == [2]


def test_neither_the_signing_version_nor_one_that_is_not_there_is_dropped(
    run: Run, settings: Settings
) -> None:
    run("tenants", "create", "acme")
    os.utime(settings.root_secret_file, (0, 0))
    for version in ("1", "7"):
        refused = run("secrets", "drop", version)
        assert refused.exit_code == 1
        assert "is the current one or does not exist" in refused.stderr
