"""What `loramux serve` says about itself."""

from pathlib import Path

import pytest

from app.cli.serve import other_commands_want


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LORAMUX_PORT", "LORAMUX_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)


def test_options_that_other_commands_do_not_know_are_given_as_environment(tmp_path: Path) -> None:
    folder = tmp_path / "my data"
    told = other_commands_want(port=8100, data_dir=folder)
    assert told == f"LORAMUX_PORT=8100 'LORAMUX_DATA_DIR={folder}'"


def test_where_nothing_was_moved_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert other_commands_want(port=None, data_dir=None) == ""
    monkeypatch.setenv("LORAMUX_PORT", "8100")
    assert other_commands_want(port=8100, data_dir=None) == ""
