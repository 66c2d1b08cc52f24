"""Which executor runs the steps: the CPU's or the device's, as the settings and the machine say."""

import logging
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from engine.clock import Clock
from engine.config import EngineConfig
from engine.grammar import MatcherSource
from engine.types import Executor

log = logging.getLogger(__name__)

Backend = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class OpenedBackend:
    executor: Executor
    device: str
    """What step times depend on beside the model."""
    allocate: Callable[[int], np.ndarray] | None
    """Host memory for adapters that the device copies from by itself; None: any will do."""


def choose_backend(asked: Literal["auto", "cpu", "cuda"]) -> Backend:
    """`asked`, or for auto what this machine has. Imports torch where that must be found out."""
    if asked != "auto":
        return asked
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def open_backend(config: EngineConfig, clock: Clock, grammars: MatcherSource) -> OpenedBackend:
    """Loads the model where steps will run.

    With auto, a device that cannot serve this model is logged with its reason, and the CPU serves.
    Raises an EngineError: BackendUnavailable where cuda was asked for and is not here.
    """
    if choose_backend(config.backend) == "cuda":
        try:
            return _open_cuda(config, clock, grammars)
        except Exception:
            if config.backend == "cuda":
                raise
            log.exception("the CUDA device cannot serve this model; the CPU does (--backend)")
    return _open_cpu(config, clock, grammars)


def _open_cuda(config: EngineConfig, clock: Clock, grammars: MatcherSource) -> OpenedBackend:
    from engine.cuda.runner import CudaExecutor

    cuda = CudaExecutor(config, clock, grammars)
    pinned = cuda.device.pinned
    return OpenedBackend(cuda, cuda.device.name, lambda nbytes: pinned(nbytes).numpy())


def _open_cpu(config: EngineConfig, clock: Clock, grammars: MatcherSource) -> OpenedBackend:
    from engine.runner import CpuExecutor

    cpu = CpuExecutor(config, clock, grammars=grammars)
    return OpenedBackend(cpu, f"{processor()} {config.threads or os.cpu_count()} threads", None)


def processor() -> str:
    """The CPU's model, as far as the system tells."""
    try:
        with open("/proc/cpuinfo") as info:
            for line in info:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
