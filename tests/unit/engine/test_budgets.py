"""Latency budgets kept, on a device whose step times are known and a simulated clock."""

from contextlib import suppress
from itertools import pairwise

import pytest

from engine.calibration import calibrate
from engine.errors import RequestRefused
from engine.types import LatencyBudget, StepPlan
from tests.engine_under_test import EngineUnderTest
from tests.fakes import describe


def device_ms(plan: StepPlan) -> float:
    """8 ms for the weights, 0.25 ms a prompt token, 0.5 ms a decode, a little for its context."""
    took_ms = 8.0
    for row in plan.rows:
        count = len(row.tokens)
        took_ms += 0.5 if count == 1 else 0.25 * count
        took_ms += 0.0005 * (row.start + count)
    return took_ms


def primed_engine(extents: int = 2000, *, context: int = 8192, **config: object) -> EngineUnderTest:
    """An engine that was calibrated as at every start."""
    engine = EngineUnderTest(
        extents,
        description=describe(context_length=context),
        step_ms=device_ms,
        **{"max_waiting": 1000, "max_waiting_per_tenant": 500, **config},
    )
    calibrate(engine.core, engine.clock, 5_000.0)
    assert engine.core.step_times.known
    return engine


def gaps_ms(engine: EngineUnderTest, request_id: str) -> list[float]:
    return [b - a for a, b in pairwise(engine.times_ms[request_id])]


def decode_step_ms(rows: int) -> float:
    return 8.0 + 0.5 * rows


class TestPromptJam:
    def test_long_prompts_that_land_at_once_do_not_stretch_a_chats_gaps(self) -> None:
        engine = primed_engine(max_running=40)
        tpot_ms = 2.0 * decode_step_ms(20)
        budget = LatencyBudget(tpot_ms=tpot_ms)
        chats = [
            engine.submit(20, tenant=f"chat{n}", max_tokens=150, budget=budget) for n in range(20)
        ]
        engine.step(10)
        prompts = [engine.submit(1500, tenant="jam", max_tokens=2) for _ in range(10)]
        engine.run()
        gaps = sorted(gap for chat in chats for gap in gaps_ms(engine, chat))
        assert gaps[int(0.99 * len(gaps))] <= tpot_ms
        assert all(engine.finished(request_id) for request_id in prompts)

    def test_and_the_prompts_get_all_that_the_budget_leaves(self) -> None:
        engine = primed_engine(max_running=40)
        budget = LatencyBudget(tpot_ms=60.0)
        engine.submit(20, tenant="chat", max_tokens=100, budget=budget)
        engine.step(5)
        engine.submit(1000, tenant="jam", max_tokens=2)
        engine.step(2)
        longest = max(len(row.tokens) for row in engine.executor.plans[-1].rows)
        assert 100 < longest < (60.0 - 8.5) / 0.25

    def test_without_a_budget_the_chunk_is_what_the_settings_say(self) -> None:
        engine = primed_engine(prefill_chunk=64)
        engine.submit(20, max_tokens=50)
        engine.step(3)
        engine.submit(1000, tenant="jam", max_tokens=2)
        engine.step(2)
        assert max(len(row.tokens) for row in engine.executor.plans[-1].rows) == 64

    def test_a_budget_too_tight_for_any_chunk_delays_a_prompt_but_not_for_ever(self) -> None:
        engine = primed_engine(queue_aging_ms=500.0)
        tight = LatencyBudget(tpot_ms=9.5)
        engine.submit(20, tenant="chat", max_tokens=400, budget=tight)
        engine.step(5)
        prompt = engine.submit(100, tenant="b", max_tokens=2)
        began = engine.clock.now_ms()
        while not engine.finished(prompt):
            engine.step()
            assert engine.clock.now_ms() - began < 2_500.0


class TestTheBatch:
    def test_it_does_not_grow_past_the_tightest_budget(self) -> None:
        engine = primed_engine(max_running=64)
        budget = LatencyBudget(tpot_ms=20.0)
        for n in range(40):
            engine.submit(20, tenant=f"t{n}", max_tokens=60, budget=budget)
        most = 0
        while engine.core.has_work:
            engine.step()
            most = max(most, len(engine.executor.live))
        assert 12 <= most <= 24  # 24 decodes take 20 ms

    def test_those_without_a_budget_take_turns_so_that_a_tight_one_is_met(self) -> None:
        engine = primed_engine(max_running=64)
        loose = [engine.submit(20, tenant="loose", max_tokens=200) for _ in range(50)]
        engine.step(20)
        tight = engine.submit(20, tenant="tight", max_tokens=50, budget=LatencyBudget(tpot_ms=22.0))
        engine.run()
        assert sorted(gaps_ms(engine, tight))[47] <= 22.0
        assert max(gap for request_id in loose for gap in gaps_ms(engine, request_id)) < 8 * 33.0
        status = engine.core.status().attainment["tight"]
        assert (status.tpot_met, status.tpot_missed) == (1, 0)


class TestAdmission:
    def flooded(self, engine: EngineUnderTest, *, tenant: str = "flood", count: int = 100) -> None:
        for _ in range(count):
            engine.submit(200, tenant=tenant, max_tokens=20)
        engine.step(4)

    def test_a_budget_that_can_be_kept_is_admitted(self) -> None:
        engine = primed_engine()
        request_id = engine.submit(budget=LatencyBudget(ttft_ms=200.0, tpot_ms=30.0))
        engine.run()
        kept = engine.core.status().attainment["a"]
        assert engine.finished(request_id)
        assert (kept.ttft_met, kept.tpot_met, kept.refused) == (1, 1, 0)

    def test_one_that_cannot_is_refused_at_once_with_the_wait(self) -> None:
        engine = primed_engine(max_running=8)
        self.flooded(engine, tenant="a")
        before = engine.core.status().waiting
        with pytest.raises(RequestRefused, match=r"about \d+ ms") as caught:
            engine.submit(tenant="a", budget=LatencyBudget(ttft_ms=300.0))
        assert caught.value.code == "budget_unattainable"
        assert caught.value.field == "loramux.ttft_ms"
        assert caught.value.retry_after_ms is not None
        assert caught.value.retry_after_ms > 1_000.0
        assert engine.core.status().waiting == before
        assert engine.core.status().attainment["a"].refused == 1

    def test_after_the_time_that_the_refusal_names_it_is_admitted(self) -> None:
        engine = primed_engine(max_running=8)
        self.flooded(engine, tenant="a", count=40)
        budget = LatencyBudget(ttft_ms=300.0)
        with pytest.raises(RequestRefused) as caught:
            engine.submit(tenant="a", budget=budget)
        until = engine.clock.now_ms() + (caught.value.retry_after_ms or 0.0)
        while engine.clock.now_ms() < until:
            engine.step()
        engine.submit(tenant="a", budget=budget)

    def test_another_tenants_flood_does_not_refuse_anybody(self) -> None:
        engine = primed_engine(max_running=8)
        self.flooded(engine)
        request_id = engine.submit(tenant="modest", budget=LatencyBudget(ttft_ms=800.0))
        engine.run()
        assert engine.core.status().attainment["modest"].ttft_met == 1
        assert engine.finished(request_id)

    def test_without_a_budget_nobody_is_refused_for_waiting(self) -> None:
        engine = primed_engine(max_running=8)
        self.flooded(engine, tenant="a")
        engine.submit(tenant="a")

    def test_time_spent_at_the_gateway_counts(self) -> None:
        engine = primed_engine()
        budget = LatencyBudget(ttft_ms=200.0)
        engine.submit(budget=budget, waited_ms=50.0)
        with pytest.raises(RequestRefused, match="190 are gone"):
            engine.submit(budget=budget, waited_ms=190.0)

    def test_a_token_budget_that_the_device_cannot_keep_alone_is_refused_by_name(self) -> None:
        engine = primed_engine()
        with pytest.raises(RequestRefused, match="even alone") as caught:
            engine.submit(budget=LatencyBudget(tpot_ms=5.0))
        assert caught.value.field == "loramux.tpot_ms"

    @pytest.mark.parametrize("policy", ["vtc", "fcfs"])
    def test_the_other_policies_promise_nothing(self, policy: str) -> None:
        engine = primed_engine(max_running=8, policy=policy)
        self.flooded(engine, tenant="a")
        engine.submit(tenant="a", budget=LatencyBudget(ttft_ms=1.0, tpot_ms=1.0))

    @pytest.mark.parametrize(
        "values",
        [
            {"budget": LatencyBudget(ttft_ms=0.0)},
            {"budget": LatencyBudget(tpot_ms=float("inf"))},
            {"budget": LatencyBudget(ttft_ms=10.0, percentile=1.0)},
            {"waited_ms": -1.0},
        ],
    )
    def test_a_budget_that_is_none_is_refused_by_its_field(self, values: dict[str, object]) -> None:
        with pytest.raises(RequestRefused) as caught:
            EngineUnderTest().submit(**values)  # type: ignore[arg-type]
        assert caught.value.code == "out_of_range"


class TestUrgency:
    def test_one_whose_time_runs_out_goes_before_its_tenants_turn(self) -> None:
        waits = {}
        for policy in ("vtc", "slo"):
            engine = primed_engine(max_running=4, policy=policy)
            # "a" was served a little more than the others and is not next
            engine.submit(600, tenant="a", max_tokens=30)
            others = [engine.submit(30, tenant="b", max_tokens=30) for _ in range(20)]
            engine.step(6)
            hurried = engine.submit(20, tenant="a", budget=LatencyBudget(ttft_ms=700.0))
            began = engine.clock.now_ms()
            engine.run()
            waits[policy] = engine.times_ms[hurried][0] - began
            assert all(engine.finished(request_id) for request_id in others)
        assert waits["slo"] <= 700.0 < waits["vtc"]

    def test_a_tenant_at_ten_times_its_share_cannot_buy_the_rest_with_its_budget(self) -> None:
        engine = primed_engine(max_running=6)
        greedy, modest = LatencyBudget(ttft_ms=400.0), LatencyBudget(ttft_ms=800.0)
        polite = []
        for n in range(400):
            with suppress(RequestRefused):
                engine.submit(60, tenant="greedy", max_tokens=20, budget=greedy)
            if n % 10 == 0:
                polite.append(engine.submit(60, tenant="modest", max_tokens=20, budget=modest))
            engine.step(3)
        engine.run()
        kept = engine.core.status().attainment
        assert kept["greedy"].refused > 40
        assert kept["modest"].refused == 0
        assert kept["modest"].ttft_met >= 0.95 * len(polite)

    @pytest.mark.parametrize(("tpot_ms", "newcomer_first"), [(500.0, True), (10.0, False)])
    def test_one_that_was_set_aside_hurries_when_its_next_token_is_due(
        self, tpot_ms: float, newcomer_first: bool
    ) -> None:
        engine = primed_engine(max_slots=1, adapter_aging_ms=1_500.0)
        mine, between, new = (engine.loader.add(name, salt=name) for name in ("a", "b", "c"))
        budget = LatencyBudget(ttft_ms=500.0, tpot_ms=tpot_ms)
        writing = engine.submit(adapter=mine, tenant="a", max_tokens=600, budget=budget)
        engine.step(10)
        other = engine.submit(adapter=between, tenant="b", max_tokens=50)
        while not engine.tokens(other):
            engine.step()
        back = len(engine.tokens(writing))
        newcomer = engine.submit(
            adapter=new, tenant="c", max_tokens=4, budget=LatencyBudget(ttft_ms=450.0)
        )
        engine.run()
        returned_ms = engine.times_ms[writing][back]
        assert (engine.times_ms[newcomer][0] < returned_ms) == newcomer_first


def test_admitted_requests_keep_their_budget_at_their_percentile_under_overload() -> None:
    engine = primed_engine(max_running=12)
    budget = LatencyBudget(ttft_ms=600.0, tpot_ms=40.0, percentile=0.9)
    refused = 0
    for n in range(600):
        try:
            engine.submit(40 + 37 * (n % 7), tenant=f"t{n % 3}", max_tokens=20, budget=budget)
        except RequestRefused:
            refused += 1
        engine.step()
    engine.run()
    for tenant, kept in engine.core.status().attainment.items():
        assert kept.ttft_met >= 0.88 * (kept.ttft_met + kept.ttft_missed), (tenant, kept)
        assert kept.tpot_met >= 0.88 * (kept.tpot_met + kept.tpot_missed), (tenant, kept)
    assert 60 < refused < 400
