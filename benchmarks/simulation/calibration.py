"""What an engine knows of its device before the first request: its own calibration, simulated."""

from benchmarks.simulation.adapters import SimulatedLoader
from benchmarks.simulation.executor import SimulatedExecutor
from benchmarks.simulation.step_models import Device
from engine.calibration import calibrate
from engine.clock import SimulatedClock
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.step_time import StepTimes

ENDLESS = [1_000_000]
"""Answers whose end is up to the request: calibration counts its own tokens."""


def calibrated(device: Device, config: EngineConfig, *, noise: float, seed: int) -> StepTimes:
    """The step-time model after the calibration of a first start."""
    clock = SimulatedClock()
    executor = SimulatedExecutor(device, clock, ENDLESS, noise=noise, seed=seed)
    loader = SimulatedLoader(clock, {}, device.rank_bytes)
    core = EngineCore(config, executor, loader, clock)
    calibrate(core, clock, config.calibration_ms)
    return core.step_times
