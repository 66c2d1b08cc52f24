"""What scheduling costs: the engine's own time a step, without a model.

    python -m benchmarks.scheduler_overhead [--running 256] [--waiting 0,500,5000]

The real EngineCore on an executor that answers at once. Prints the median and the 95th percentile
of the time a step took, all of it: admission, policy, the plan, the commit, the events.
"""

import argparse
import statistics
import time

from engine.calibration import calibrate
from engine.clock import SimulatedClock
from engine.core import EngineCore
from engine.step_time import StepShape, StepTimes
from engine.types import (
    AdapterBlob,
    GenerateRequest,
    LatencyBudget,
    RowResult,
    SamplingParams,
    StepPlan,
    StepResult,
)
from tests.fakes import FakeLoader, describe, engine_config

STEPS = 200
TENANTS = 300


class InstantExecutor:
    """Draws the same token for everybody; keeps nothing."""

    def __init__(self, clock: SimulatedClock, extents: int) -> None:
        self.description = describe(context_length=8192)
        self.extent_count = extents
        self._clock = clock
        self.spent_s = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        self._clock.advance(20.0)
        rows = [RowResult(row.seq, [5] if row.sample else []) for row in plan.rows]
        self.spent_s += time.perf_counter() - began
        return StepResult(plan.step, rows, 20.0)

    def start_copy(self, slot: int, first_extent: int, blob: AdapterBlob) -> None: ...

    def poll_copies(self, max_bytes: int) -> list[int]:
        return []

    def move_adapter(self, slot: int, first_extent: int) -> None: ...

    def drop_adapter(self, slot: int) -> None: ...


def loaded_core(running: int, waiting: int, policy: str) -> tuple[EngineCore, InstantExecutor]:
    """An engine with so many sequences decoding and so many requests waiting."""
    clock = SimulatedClock()
    executor = InstantExecutor(clock, 40_000)
    config = engine_config(
        max_running=running,
        max_waiting=100_000,
        max_waiting_per_tenant=100_000,
        max_batch_tokens=max(512, running),
        policy=policy,
    )
    times = StepTimes()
    for rows in (1, 8, 64, 256) * 4:
        times.observe(StepShape(0, rows, 200 * rows), 10.0 + 0.05 * rows)
        times.observe(StepShape(rows, rows, 200 * rows, rows * rows), 12.0 + 0.1 * rows)
    core = EngineCore(config, executor, FakeLoader(clock), clock, times)
    calibrate(core, clock, 200.0)
    for n in range(running + waiting):
        core.submit(
            GenerateRequest(
                request_id=f"r{n}",
                tenant=f"t{n % TENANTS}",
                prompt=[2 + (n + i) % 900 for i in range(64)],
                sampling=SamplingParams(max_tokens=4000),
                cache_salt=f"{n}",
                budget=LatencyBudget(ttft_ms=1e9, tpot_ms=1000.0) if n % 2 else LatencyBudget(),
            )
        )
    for _ in range(80):
        core.step()
    return core, executor


def step_times_ms(core: EngineCore, executor: InstantExecutor) -> list[float]:
    """The engine's part of every step."""
    taken = []
    for _ in range(STEPS):
        spent_s, began = executor.spent_s, time.perf_counter()
        core.step()
        taken.append(1000.0 * (time.perf_counter() - began - (executor.spent_s - spent_s)))
    return sorted(taken)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", default="0,500,5000")
    parser.add_argument("--policy", default="slo")
    options = parser.parse_args()
    print(f"policy {options.policy}: {options.running} running, {STEPS} steps")
    for waiting in map(int, options.waiting.split(",")):
        core, executor = loaded_core(options.running, waiting, options.policy)
        status = core.status()
        taken = step_times_ms(core, executor)
        print(
            f"  {status.running} running, {status.waiting} waiting: "
            f"median {statistics.median(taken):.2f} ms, p95 {taken[int(0.95 * STEPS)]:.2f} ms"
        )


if __name__ == "__main__":
    main()
