"""One simulated run with everything that reports and plots want of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.bench.plots import Run, Timeline
from app.bench.report import Report, summarise
from app.bench.workloads import TimedRequest
from benchmarks.simulation.adapters import HOST_RESIDENT, StoreSpeed
from benchmarks.simulation.run import RunResult, Sample, Simulation, engine_config
from benchmarks.simulation.step_models import GB, Device
from engine.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Trial:
    result: RunResult
    report: Report

    def of(self, *tenants: str) -> Report:
        """The report over these tenants alone."""
        chosen = [o for o in self.result.outcomes if o.tenant in tenants]
        return summarise(chosen, self.result.end_ms / 1000.0)

    def plotted(self) -> Run:
        return Run(self.result.outcomes, self.report, timeline(self.result.samples))


def run_trial(
    device: Device,
    requests: Sequence[TimedRequest],
    *,
    config: EngineConfig | None = None,
    seed: int = 0,
    speed: StoreSpeed = HOST_RESIDENT,
    noise: float = 0.03,
    from_ms: float = 0.0,
    **changes: Any,
) -> Trial:
    """Runs to the end of the last request. `changes`: engine settings, when `config` is not given.

    `from_ms`: requests sent earlier fill the device and its caches; the report leaves them out.

    Raises AssertionError when the engine did not give everything back: then no figure counts.
    """
    config = config or engine_config(device, **changes)
    simulation = Simulation(device, config, requests, seed=seed, speed=speed, noise=noise)
    result = simulation.run()
    if result.leftovers:
        raise AssertionError("; ".join(result.leftovers[:5]))
    result.outcomes = [o for o in result.outcomes if o.sent_ms >= from_ms]
    return Trial(result, summarise(result.outcomes, max(result.end_ms - from_ms, 1.0) / 1000.0))


def timeline(samples: Sequence[Sample]) -> Timeline:
    """Residency, memory and queues over the run."""
    curves: dict[str, list[float]] = {
        "adapters on the device": [s.adapters_on_device for s in samples],
        "adapter bytes on the device (GB)": [s.device_adapter_bytes / GB for s in samples],
        "adapter bytes on the host (GB)": [s.host_adapter_bytes / GB for s in samples],
        "KV blocks in use": [s.kv_blocks_used for s in samples],
        "running": [s.running for s in samples],
        "waiting": [s.waiting for s in samples],
    }
    return Timeline([s.at_ms for s in samples], curves)
