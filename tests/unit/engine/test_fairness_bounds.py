"""What no trace may break: the gap between backlogged tenants, and the length of every wait."""

from contextlib import suppress
from itertools import combinations

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from engine.errors import RequestRefused
from engine.policy import LatencyBudgets, token_cost
from engine.types import LatencyBudget
from tests.engine_under_test import EngineUnderTest
from tests.fakes import describe

PROMPT, ANSWER = 90, 24
COST = token_cost(PROMPT, ANSWER, 0)
RUNNING = 2
LEAD = 100.0
"""Small, so that a trace of some dozen requests would tell if it were not kept."""
GAP_BOUND = 2 * RUNNING * COST
"""Published in docs/scheduling.md: what a full batch of one tenant costs, once for the tenant that
was ahead when the other's backlog began and once for the one that is ahead now. Urgency adds its
lead, doubled for a tenant below its percentile."""

requests = st.lists(
    st.tuples(
        st.sampled_from("abcccccc"),
        st.integers(2, PROMPT),
        st.integers(1, ANSWER),
        st.sampled_from([None, 150.0, 600.0, 5000.0]),
        st.integers(0, 3),  # steps after it
    ),
    min_size=60,
    max_size=90,
)


def loaded_engine(**config: object) -> EngineUnderTest:
    engine = EngineUnderTest(
        100,
        description=describe(context_length=256),
        step_ms=lambda plan: 4.0 + 0.2 * sum(len(row.tokens) for row in plan.rows),
        **{"max_running": RUNNING, "max_choices": 1, "max_batch_tokens": 64, **config},
    )
    for _ in range(12):  # the model knows the device
        engine.submit(30, tenant="warm", max_tokens=3)
        engine.run()
    return engine


@settings(
    max_examples=12,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(requests, st.sampled_from(["slo", "vtc"]))
def test_backlogged_tenants_are_served_alike_within_the_published_bound(
    trace: list[tuple[str, int, int, float | None, int]], policy: str
) -> None:
    engine = loaded_engine(policy=policy)
    counters = engine.core._policy
    engine.core._check_budget = lambda *_: None  # type: ignore[method-assign]  # whatever is late stays, and presses
    if isinstance(counters, LatencyBudgets):
        counters.usual_lead = LEAD
    since: dict[tuple[str, str], float] = {}  # of a pair: the gap when both had a backlog at last
    for tenant, prompt, answer, ttft_ms, steps in trace:
        with suppress(RequestRefused):
            budget = LatencyBudget(ttft_ms=ttft_ms)
            engine.submit(prompt, tenant=tenant, max_tokens=answer, budget=budget)
        for _ in range(steps):
            engine.step()
            waiting = engine.core._scheduler.waiting_of
            lead = 2 * LEAD if policy == "slo" else 0.0
            for pair in combinations("abc", 2):
                gap = counters.priority(pair[0]) - counters.priority(pair[1])
                if all(map(waiting, pair)):
                    assert abs(gap - since.setdefault(pair, gap)) <= GAP_BOUND + lead
                else:
                    since.pop(pair, None)


@settings(
    max_examples=12,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(requests)
def test_nobody_waits_longer_than_the_bound_however_the_rest_is_budgeted(
    trace: list[tuple[str, int, int, float | None, int]],
) -> None:
    """Each fourth admission goes by age: so many admissions, each of a longest request."""
    aging_ms = 400.0
    engine = loaded_engine(queue_aging_ms=aging_ms)
    patient = [engine.submit(20, tenant="patient", weight=0.001, max_tokens=2) for _ in range(3)]
    began = engine.clock.now_ms()
    for tenant, prompt, answer, ttft_ms, steps in trace:
        with suppress(RequestRefused):
            budget = LatencyBudget(ttft_ms=ttft_ms, tpot_ms=40.0)
            engine.submit(prompt, tenant=tenant, weight=100.0, max_tokens=answer, budget=budget)
        engine.step(steps)
    engine.run()
    longest_ms = (PROMPT + ANSWER) * 0.2 + 30 * 4.0 * 2
    for place, request_id in enumerate(patient):
        waited = engine.times_ms[request_id][0] - began
        assert waited <= aging_ms + 4 * (place + 1) * longest_ms
