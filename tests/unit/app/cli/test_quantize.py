"""`loramux quantize` as a person gives it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.cli import app
from tests.model_factories import make_llama, save_folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_folder(make_llama(seed=3), tmp_path / "source")


def test_it_says_sizes_and_errors_then_refuses_to_overwrite(source: Path, tmp_path: Path) -> None:
    command = ["quantize", str(source), str(tmp_path / "target"), "--group-size", "64"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "21 linears at 4." in done.stdout
    assert "MiB before" in done.stdout
    assert "% of a weight matrix on average, at most" in done.stdout
    again = CliRunner().invoke(app, command)
    assert (again.exit_code, again.stdout) == (1, "")
    assert "--force replaces it" in again.stderr
    forced = CliRunner().invoke(app, [*command, "--force", "--symmetric", "--json"])
    assert json.loads(forced.stdout)["linears"] == 21
