"""What a step costs must not grow with what waits: counted in calls, not in time."""

import sys
from types import FrameType

import pytest

from engine.types import LatencyBudget
from tests.engine_under_test import EngineUnderTest


def calls_of_a_step(waiting: int, policy: str, tenants: int) -> float:
    """Python calls of a step with 16 sequences running and so many requests waiting."""
    engine = EngineUnderTest(
        400, policy=policy, max_running=16, max_waiting=10_000, max_waiting_per_tenant=10_000
    )
    for n in range(16 + waiting):
        budget = LatencyBudget(ttft_ms=1e6) if n % 2 else LatencyBudget()
        engine.submit([2 + n % 900, 3, 4], tenant=f"t{n % tenants}", max_tokens=60, budget=budget)
    engine.step(10)
    calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        for _ in range(20):
            engine.core.step()
    finally:
        sys.setprofile(None)
    assert engine.core.status().waiting == waiting
    return calls / 20


@pytest.mark.parametrize("tenants", [3, 500])
@pytest.mark.parametrize("policy", ["slo", "vtc", "fcfs"])
def test_a_hundred_times_as_many_waiting_make_a_step_hardly_dearer(
    policy: str, tenants: int
) -> None:
    assert calls_of_a_step(2000, policy, tenants) <= 1.2 * calls_of_a_step(20, policy, tenants)
