"""Who runs in a step: budgets, chunks, preemption, fairness. On a simulated clock."""

from itertools import pairwise

import pytest

from engine.policy import token_cost
from engine.types import StepPlan
from tests.engine_under_test import EngineUnderTest
from tests.fakes import describe, expected_tokens


def tokens_of(plan: StepPlan) -> int:
    return sum(len(row.tokens) for row in plan.rows)


class TestTheBudget:
    def test_decodes_and_prefill_chunks_share_one_step(self) -> None:
        engine = EngineUnderTest(max_batch_tokens=64, prefill_chunk=32)
        engine.submit(20, max_tokens=20)
        engine.step(2)
        engine.submit(100, max_tokens=20)
        engine.step()
        assert sorted(len(row.tokens) for row in engine.executor.plans[-1].rows) == [1, 32]

    def test_no_step_exceeds_it(self) -> None:
        engine = EngineUnderTest(max_batch_tokens=48, max_running=48)
        for length in (100, 7, 60, 1, 130):
            engine.submit(length, max_tokens=10)
        engine.run()
        assert max(tokens_of(plan) for plan in engine.executor.plans) == 48

    def test_a_prompt_in_chunks_says_what_it_says_in_one(self) -> None:
        prompt = [2 + i for i in range(150)]
        for budget in (7, 64, 512):
            engine = EngineUnderTest(max_batch_tokens=budget, max_running=4)
            request_id = engine.submit(prompt, max_tokens=10)
            engine.run()
            assert engine.tokens(request_id) == expected_tokens(prompt, 10)

    def test_a_long_prompt_does_not_stop_a_running_decode(self) -> None:
        engine = EngineUnderTest(extents=200, max_batch_tokens=64, prefill_chunk=32)
        first = engine.submit(10, max_tokens=60)
        engine.step(3)
        engine.submit(1000, tenant="b")
        engine.step(20)
        gaps = [b - a for a, b in pairwise(engine.times_ms[first])]
        assert set(gaps) == {10.0}

    def test_no_more_sequences_run_than_there_are_places(self) -> None:
        engine = EngineUnderTest(max_running=4)
        for n in range(12):
            engine.submit(20, choices=1 + n % 3, max_tokens=12)
        for _ in range(100):
            engine.step()
            assert len(engine.executor.live) <= 4
        engine.run()
        engine.assert_all_returned()


class TestPreemption:
    def test_those_that_do_not_fit_together_all_finish_with_the_same_answers(self) -> None:
        engine = EngineUnderTest(extents=20, max_running=8)
        prompts = [[2 + 5 * n + i for i in range(30)] for n in range(8)]
        ids = [engine.submit(prompt, max_tokens=60) for prompt in prompts]
        engine.run()
        assert engine.core.status().preemptions_total > 0
        for request_id, prompt in zip(ids, prompts, strict=True):
            assert engine.tokens(request_id) == expected_tokens(prompt, 60)
            engine.assert_stream_is_whole(request_id)
        engine.assert_all_returned()

    def test_the_last_to_arrive_gives_way_first(self) -> None:
        engine = EngineUnderTest(extents=8, policy="fcfs", description=describe(context_length=64))
        first, last = engine.submit(30, max_tokens=34), engine.submit(30, max_tokens=34)
        third = engine.submit(30, max_tokens=34)
        engine.run()
        usages = [engine.last(request_id).usage for request_id in (first, last, third)]
        preempted = [usage.preemptions for usage in usages if usage is not None]
        assert preempted[0] == 0
        assert sum(preempted) > 0

    def test_the_tenant_served_most_gives_way_first(self) -> None:
        engine = EngineUnderTest(extents=8, description=describe(context_length=64))
        greedy = [engine.submit(30, max_tokens=34, tenant="greedy") for _ in range(2)]
        modest = engine.submit(30, max_tokens=34, tenant="modest")
        engine.run()
        usage = engine.last(modest).usage
        assert usage is not None
        assert usage.preemptions == 0
        assert sum(engine.last(r).usage.preemptions for r in greedy) > 0  # type: ignore[union-attr]

    def test_cached_prefixes_give_way_before_anybody_is_preempted(self) -> None:
        engine = EngineUnderTest(extents=12)
        for _ in range(6):
            engine.submit(60, max_tokens=4)
            engine.run()
        assert engine.core.status().kv_blocks_cached > 0
        assert engine.core.status().preemptions_total == 0

    def test_idle_adapters_give_way_before_anybody_is_preempted(self) -> None:
        engine = EngineUnderTest(extents=16)
        ref = engine.loader.add("idle", extents=8)
        engine.submit(adapter=ref)
        engine.run()
        ids = [engine.submit(30, max_tokens=30) for _ in range(4)]
        engine.run()
        assert all(engine.last(request_id).finish == "length" for request_id in ids)
        assert engine.core.status().preemptions_total == 0
        assert engine.executor.spans() == []
        assert engine.core.status().host_adapter_bytes == 8 * 1024

    def test_a_recomputation_is_not_charged(self) -> None:
        counters = []
        for extents in (10, 64):
            engine = EngineUnderTest(extents=extents, description=describe(context_length=80))
            for n in range(3):
                engine.submit([2 + n] * 30, max_tokens=50, request_id=f"{n}", cache_salt=f"{n}")
            policy = engine.core._scheduler._policy
            paid = 0.0
            while engine.core.has_work:
                engine.step()
                paid = max(paid, policy.priority("a"))
            counters.append(paid)
        assert counters == [pytest.approx(3 * token_cost(30, 50, 0), abs=2.0)] * 2


class TestFairness:
    def finish_times(self, engine: EngineUnderTest, ids: list[str]) -> list[float]:
        return [engine.times_ms[request_id][-1] for request_id in ids]

    def flood(self, engine: EngineUnderTest) -> tuple[list[str], str]:
        """Forty requests of one tenant, a moment later one of another."""
        ids = [engine.submit(30, tenant="flood", max_tokens=10) for _ in range(40)]
        engine.step(2)
        return ids, engine.submit(30, tenant="modest", max_tokens=10)

    def test_a_flood_of_one_tenant_does_not_hold_up_another(self) -> None:
        engine = EngineUnderTest(max_running=4, max_choices=1)
        flood, modest = self.flood(engine)
        engine.run()
        earlier = [t for t in self.finish_times(engine, flood) if t < engine.times_ms[modest][0]]
        assert len(earlier) <= 4

    def test_first_come_first_served_would(self) -> None:
        engine = EngineUnderTest(max_running=4, max_choices=1, policy="fcfs")
        flood, modest = self.flood(engine)
        engine.run()
        assert max(self.finish_times(engine, flood)) <= engine.times_ms[modest][-1]

    def test_a_tenant_with_a_long_prompt_does_not_hold_up_a_short_one(self) -> None:
        engine = EngineUnderTest(extents=300, max_batch_tokens=64)
        engine.submit(2000, tenant="long", max_tokens=2)
        engine.step(2)
        short = engine.submit(30, tenant="short", max_tokens=2)
        engine.step(2)
        assert engine.tokens(short) != []

    def test_tokens_are_shared_by_weight(self) -> None:
        engine = EngineUnderTest(max_running=2, max_choices=1, max_waiting=500, extents=200)
        for _ in range(100):
            engine.submit(30, tenant="heavy", weight=3.0, max_tokens=10)
            engine.submit(30, tenant="light", weight=1.0, max_tokens=10)
        served = {"heavy": 0, "light": 0}
        for _ in range(300):
            for event in engine.step():
                heavy = int(event.request_id[1:]) % 2 == 1
                served["heavy" if heavy else "light"] += len(event.token_ids)
        assert 2.5 < served["heavy"] / served["light"] < 3.5

    def test_a_validation_probe_waits_for_the_tenants_but_not_for_ever(self) -> None:
        engine = EngineUnderTest(max_running=2, max_choices=1, max_waiting=500)
        tenants = [engine.submit(30, tenant="a", max_tokens=10) for _ in range(60)]
        probes = [engine.submit(30, tenant="a", max_tokens=10, system=True) for _ in range(3)]
        assert engine.core.status().waiting_by_tenant == {"a": 60, "system": 3}
        engine.run()
        ends = sorted(self.finish_times(engine, tenants))
        first, *_, last = self.finish_times(engine, probes)
        assert first < ends[20]
        assert sum(end < last for end in ends) >= 20

    def test_nobody_waits_for_ever_behind_a_tenant_that_is_always_first(self) -> None:
        engine = EngineUnderTest(max_running=1, max_choices=1, queue_aging_ms=500.0)
        unlucky = engine.submit(30, tenant="light", weight=0.001, max_tokens=5)
        engine.run()
        unlucky = engine.submit(30, tenant="light", weight=0.001, max_tokens=5)
        for _ in range(400):
            while engine.core.status().waiting < 3:
                engine.submit(30, tenant="heavy", weight=1000.0, max_tokens=5)
            engine.step()
        assert engine.finished(unlucky)
        assert engine.times_ms[unlucky][-1] < 1000.0


def test_no_decision_depends_on_the_time_of_day(monkeypatch: pytest.MonkeyPatch) -> None:
    def trace() -> list[StepPlan]:
        engine = EngineUnderTest(extents=20, max_running=6)
        ref = engine.loader.add("a", load_ms=30.0)

        def refuse() -> int:
            raise AssertionError("a decision asked for the time of day")

        monkeypatch.setattr(engine.clock, "wall_ms", refuse)
        for n in range(10):
            engine.submit(25, adapter=ref if n % 2 else None, max_tokens=30, tenant=f"t{n % 3}")
        engine.run()
        return engine.executor.plans

    assert trace() == trace()
