"""What scheduling costs: the engine's own time a step, without a model.

    python -m benchmarks.scheduler_overhead [--running 256] [--waiting 0,500,5000]

The real EngineCore on an executor that answers at once. Prints the median and the 95th percentile
of the processor time of a step: of the decisions alone (admission, policy, the plan), and of all of
it (what the step brought is taken in, and every token's event made).
"""

import argparse
import statistics
import time

from benchmarks.arguments import at_least_one
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
        self.called_at = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        self.called_at = began = time.thread_time()
        self._clock.advance(20.0)
        rows = [RowResult(row.seq, [5] if row.sample else []) for row in plan.rows]
        self.spent_s += time.thread_time() - began
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


def step_times_ms(core: EngineCore, executor: InstantExecutor) -> tuple[list[float], list[float]]:
    """Of every step: the decisions, and everything but the executor's part."""
    decisions, everything = [], []
    for _ in range(STEPS):
        spent_s, began = executor.spent_s, time.thread_time()
        core.step()
        ended = time.thread_time()
        everything.append(1000.0 * (ended - began - (executor.spent_s - spent_s)))
        decisions.append(1000.0 * (executor.called_at - began))
    return sorted(decisions), sorted(everything)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--running", type=at_least_one, default=256)
    parser.add_argument("--waiting", default="0,500,5000")
    parser.add_argument("--policy", default="slo")
    options = parser.parse_args()
    print(f"policy {options.policy}: {options.running} running, {STEPS} steps")
    for waiting in map(int, options.waiting.split(",")):
        core, executor = loaded_core(options.running, waiting, options.policy)
        status = core.status()
        print(f"  {status.running} running, {status.waiting} waiting:", end="")
        for name, taken in zip(
            ("decisions", "everything"), step_times_ms(core, executor), strict=True
        ):
            median, p95 = statistics.median(taken), taken[int(0.95 * STEPS)]
            print(f"  {name} {median:.2f} ms (p95 {p95:.2f})", end="")
        print()


if __name__ == "__main__":
    main()
