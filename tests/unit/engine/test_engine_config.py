from pathlib import Path

import pytest

from engine.config import EngineConfig
from tests.fakes import engine_config


def test_the_command_line_wins_over_the_environment() -> None:
    environ = {
        "LORAMUX_ENGINE_BASE_MODEL": "env.gguf",
        "LORAMUX_ENGINE_MAX_RUNNING": "7",
        "LORAMUX_ENGINE_PREFIX_CACHING": "false",
    }
    config = EngineConfig.from_args(["--base-model", "arg.gguf"], environ)
    assert config.base_model == Path("arg.gguf")
    assert (config.max_running, config.prefix_caching) == (7, False)


def test_an_optional_path_is_a_path() -> None:
    config = EngineConfig.from_args(["--base-model", "x", "--journal-path", "j"], {})
    assert config.journal_path == Path("j")


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--base-model", "x", "--policy", "lottery"],
        ["--base-model", "x", "--max-running", "many"],
        ["--base-model", "x", "--max-running", "0"],
        ["--base-model", "x", "--prefix-caching", "perhaps"],
        ["--base-model", "x", "--adapter-share", "1.5"],
        ["--base-model", "x", "--no-such-flag", "1"],
    ],
)
def test_what_cannot_be_read_ends_with_a_usage_message(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        EngineConfig.from_args(flags, {})
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"),
    [("LINEAR_PATH", "nativ"), ("BACKEND", "gpu"), ("MAX_RUNNING", "many"), ("TRACING", "perhaps")],
)
def test_the_environment_is_checked_as_the_command_line_is(
    name: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        EngineConfig.from_args(["--base-model", "x"], {f"LORAMUX_ENGINE_{name}": value})
    message = capsys.readouterr().err
    assert value in message
    assert name in message.upper().replace("-", "_")


def test_a_step_must_hold_a_decode_of_every_running_sequence() -> None:
    with pytest.raises(ValueError, match="max_batch_tokens"):
        engine_config(max_batch_tokens=16, max_running=17)
