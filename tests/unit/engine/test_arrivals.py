"""What later arrivals leave of the device, and what that does to a prediction."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.arrivals import (
    MEMORY_MS,
    NONE,
    SWEEP_ABOVE,
    Arrivals,
    Overtaking,
    Question,
    fair_share,
)
from engine.backlog import Work
from engine.forecast import SURPRISES, Standing, first_token_ms, with_overtaking_ms
from engine.policy import LatencyBudgets
from engine.step_time import StepShape, StepTimes

ASKED = Question(token_ms=0.1, answer_cost=0.0, within_ms=500.0)
STANDING = Standing(Work(), 0, 100, 16, StepShape(), 256, 50.0, 0.0)


class TestFairShare:
    def test_who_wants_little_leaves_the_rest(self) -> None:
        assert fair_share(1.0, [(0.1, 1.0), (0.2, 1.0)]) == pytest.approx(0.7)

    def test_nobody_leaves_less_than_the_share_by_weight(self) -> None:
        assert fair_share(1.0, [(5.0, 1.0), (5.0, 2.0)]) == pytest.approx(0.25)

    def test_what_a_modest_one_leaves_is_divided_among_the_rest(self) -> None:
        assert fair_share(1.0, [(0.1, 1.0), (5.0, 1.0)]) == pytest.approx(0.45)

    @given(
        st.floats(0.01, 100.0),
        st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.01, 100.0)), max_size=8),
    )
    def test_it_is_what_is_left_and_never_below_the_claim_by_weight(
        self, weight: float, others: list[tuple[float, float]]
    ) -> None:
        share = fair_share(weight, others)
        claim = weight / (weight + sum(theirs for _, theirs in others))
        left = 1.0 - sum(demand for demand, _ in others)
        assert max(claim, left) * (1 - 1e-9) <= share <= 1.0 + 1e-9


class TestOvertaking:
    def arrivals(self) -> tuple[Arrivals, LatencyBudgets]:
        """Two tenants; "steady" sends 100 tokens each 20 ms, "flood" was served far more."""
        policy = LatencyBudgets(lead=1000.0)
        for tenant in ("flood", "steady"):
            policy.activate(tenant)
        policy.charge("flood", 1.0, 50_000.0)
        arrivals = Arrivals(policy)
        for n in range(500):
            arrivals.add("steady", 1.0, 100, 20.0 * n)
        return arrivals, policy

    def test_the_rate_of_those_served_less_is_what_they_take(self) -> None:
        found = self.arrivals()[0].overtaking("flood", 1.0, 10_000.0, ASKED)
        assert found.share == pytest.approx(1.0 - 5.0 * 0.1, rel=0.02)
        assert found.variance_ms == pytest.approx(5.0 * 100 * 0.01, rel=0.02)

    def test_those_served_more_take_nothing(self) -> None:
        assert self.arrivals()[0].overtaking("steady", 1.0, 10_000.0, ASKED) == NONE

    def test_a_tenant_that_is_within_the_lead_is_passed(self) -> None:
        arrivals, policy = self.arrivals()
        policy.charge("steady", 1.0, 49_500.0)
        assert arrivals.overtaking("flood", 1.0, 10_000.0, ASKED) == NONE

    def test_a_tenant_takes_no_more_than_brings_it_within_the_lead(self) -> None:
        arrivals, policy = self.arrivals()
        policy.charge("steady", 1.0, 48_000.0)
        # 1000 of the counter is left; in 500 ms it would send 2500
        found = arrivals.overtaking("flood", 1.0, 10_000.0, ASKED)
        assert 1.0 - found.share == pytest.approx(0.4 * 0.5, rel=0.02)

    def test_what_came_long_ago_takes_nothing(self) -> None:
        later_ms = 10_000.0 + 10 * MEMORY_MS
        found = self.arrivals()[0].overtaking("flood", 1.0, later_ms, ASKED)
        assert found.share == pytest.approx(1.0, abs=1e-3)

    def test_tenants_that_went_silent_are_forgotten(self) -> None:
        arrivals = self.arrivals()[0]
        for n in range(20 * SWEEP_ABOVE):
            arrivals.add(f"t{n}", 1.0, 10, 1e4 * n)
        assert len(arrivals) <= SWEEP_ABOVE + 1


class TestPrediction:
    def test_half_of_the_device_takes_twice_as_long(self) -> None:
        half = replace(STANDING, overtaking=Overtaking(0.5, 3.0))
        assert with_overtaking_ms(100.0, half) == pytest.approx(200.0)
        assert with_overtaking_ms(100.0, STANDING) == 100.0

    @given(st.floats(0.1, 1e4), st.floats(0.01, 0.99), st.floats(0.0, 100.0))
    def test_it_is_when_the_work_and_all_that_overtook_it_is_done(
        self, work_ms: float, share: float, variance_ms: float
    ) -> None:
        standing = replace(STANDING, overtaking=Overtaking(share, variance_ms), percentile=0.95)
        took_ms = with_overtaking_ms(work_ms, standing)
        overtook_ms = (1.0 - share) * took_ms + SURPRISES * 1.6449 * (variance_ms * took_ms) ** 0.5
        assert took_ms == pytest.approx(work_ms + overtook_ms, rel=1e-3)

    def test_a_stricter_percentile_and_uneven_arrivals_predict_more(self) -> None:
        times = StepTimes()
        for n in range(100):
            times.observe(StepShape(32 * (n % 11), 1 + n % 17), 10.0 + 6.4 * (n % 11))
        usual = replace(STANDING, overtaking=Overtaking(0.5, 3.0), percentile=0.9)
        strict = replace(usual, percentile=0.99)
        uneven = replace(usual, overtaking=Overtaking(0.5, 30.0))
        assert first_token_ms(strict, times) > first_token_ms(usual, times)
        assert first_token_ms(uneven, times) > first_token_ms(usual, times)
