"""Where steps run is a setting, and what cannot be had is said before anything is loaded."""

from pathlib import Path

import pytest
import torch

from engine import backends
from engine.backends import choose_backend, open_backend
from engine.clock import SimulatedClock
from engine.config import EngineConfig
from engine.cuda.device import BackendUnavailable
from engine.errors import EngineError


@pytest.mark.parametrize(
    ("asked", "there", "chosen"),
    [
        ("auto", True, "cuda"), ("auto", False, "cpu"),
        ("cpu", True, "cpu"), ("cuda", False, "cuda"),
    ],
)  # fmt: skip
def test_auto_takes_a_device_where_one_is(
    monkeypatch: pytest.MonkeyPatch, asked, there: bool, chosen: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert choose_backend(asked) == chosen


def test_cuda_that_is_not_there_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = EngineConfig(base_model=tmp_path / "none", backend="cuda")
    with pytest.raises(BackendUnavailable, match=r"finds no CUDA device.*--backend cpu") as refused:
        open_backend(config, SimulatedClock(), None)  # type: ignore[arg-type]
    assert isinstance(refused.value, EngineError)
    assert refused.value.code == "backend_unavailable"


def test_the_cpu_is_known_by_its_processor_and_threads(monkeypatch, tmp_path: Path) -> None:
    opened = []
    monkeypatch.setattr(
        "engine.runner.CpuExecutor", lambda *args, **options: opened.append(args) or "executor"
    )
    config = EngineConfig(base_model=tmp_path, backend="cpu", threads=3)
    backend = open_backend(config, SimulatedClock(), None)  # type: ignore[arg-type]
    assert backend.device == f"{backends.processor()} 3 threads"
    assert (backend.executor, backend.allocate, len(opened)) == ("executor", None, 1)


def test_auto_falls_back_to_the_cpu_and_says_why(
    monkeypatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object) -> None:
        raise BackendUnavailable("heads of 80 are not supported")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("engine.cuda.runner.CudaExecutor", refuse)
    monkeypatch.setattr("engine.runner.CpuExecutor", lambda *args, **options: "executor")
    auto = EngineConfig(base_model=tmp_path)
    assert open_backend(auto, SimulatedClock(), None).executor == "executor"  # type: ignore[arg-type]
    assert "the CPU does" in caplog.text
    assert "heads of 80" in caplog.text
    asked = EngineConfig(base_model=tmp_path, backend="cuda")
    with pytest.raises(BackendUnavailable, match="heads of 80"):
        open_backend(asked, SimulatedClock(), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("share", ["0", "1.01", "-1"])
def test_a_share_of_the_device_is_a_share(share: str, capsys) -> None:
    with pytest.raises(SystemExit):
        EngineConfig.from_args(["--base-model", "x", "--device-memory-share", share], {})
    assert "device_memory_share" in capsys.readouterr().err
