"""What `loramux bench` refuses before it sends anything: each names the remedy."""

import pytest
from typer.testing import CliRunner

from app.cli import app


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LORAMUX_API_KEY", "LORAMUX_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ("--workload tsunami --key k", "there are identical, uniform, zipf"),
        ("", "set LORAMUX_API_KEY"),
        ("--workload flood --key k", "give a --key of each"),
        ("--key k --url http://127.0.0.1:9", "no server answers"),
        ("--key k --url 127.0.0.1:9", "begins with http"),
    ],
)
def test_a_command_that_cannot_work_says_what_to_do(arguments: str, remedy: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments.split()])
    assert result.exit_code == 1
    assert remedy in " ".join(result.stderr.split())


@pytest.mark.parametrize("option", ["--rate 0", "--seconds 0", "--percentile 1", "--cv 0"])
def test_a_value_out_of_range_is_named(option: str) -> None:
    result = CliRunner().invoke(app, ["bench", "--key", "k", *option.split()])
    assert result.exit_code == 2
    assert option.split()[0] in result.stderr
