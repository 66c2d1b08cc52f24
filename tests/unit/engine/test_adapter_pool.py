"""Adapters on their way, in host memory and on the device: loads, budgets, quarantine, erasure."""

from itertools import pairwise

import pytest

from engine.adapters.loading import LoadFailed
from engine.errors import AdapterRefused
from engine.types import AdapterRef, Residency
from tests.engine_under_test import EngineUnderTest
from tests.fakes import EXTENT_BYTES, expected_tokens


def residency(engine: EngineUnderTest) -> dict[AdapterRef, Residency]:
    return {item.adapter: item for item in engine.core.status().adapters}


class TestLoading:
    def test_a_request_gets_its_adapter(self) -> None:
        engine = EngineUnderTest()
        ref = engine.loader.add("a", load_ms=40.0)
        request_id = engine.submit([5] * 20, adapter=ref, max_tokens=6)
        engine.run()
        expected = expected_tokens([5] * 20, 6, blob=engine.loader.blob(ref))
        assert engine.tokens(request_id) == expected
        usage = engine.last(request_id).usage
        assert usage is not None
        assert usage.adapter_wait_ms >= 40.0

    def test_begins_when_the_request_arrives(self) -> None:
        engine = EngineUnderTest(max_running=1, max_choices=1)
        engine.submit(max_tokens=30)
        engine.step(2)
        ref = engine.loader.add("a")
        engine.submit(adapter=ref)
        engine.step(4)
        assert residency(engine)[ref].tier == "device"

    def test_of_many_requests_for_one_adapter_is_one_load(self) -> None:
        engine = EngineUnderTest()
        ref = engine.loader.add("a", load_ms=40.0)
        for _ in range(10):
            engine.submit(adapter=ref)
            engine.step()
        engine.run()
        assert engine.loader.measured == engine.loader.built == [ref]
        assert engine.executor.copied_bytes == EXTENT_BYTES

    def test_of_the_same_digest_for_two_tenants_is_two_loads(self) -> None:
        engine = EngineUnderTest()
        one, two = engine.loader.add("a", salt="aa"), engine.loader.add("a", salt="bb")
        engine.submit(adapter=one)
        engine.run()
        engine.submit(adapter=two, tenant="b")
        engine.run()
        assert engine.loader.measured == [one, two]

    def test_is_bounded_in_number(self) -> None:
        engine = EngineUnderTest(max_loads=2)
        for n in range(9):
            engine.submit(adapter=engine.loader.add(f"{n}", load_ms=100.0))
        engine.run()
        assert engine.loader.most_at_once == 2

    def test_a_slow_one_does_not_hold_up_anybody_else(self) -> None:
        engine = EngineUnderTest()
        others = [engine.submit(tenant="b", max_tokens=400), engine.submit(max_tokens=400)]
        engine.step(3)
        slow = engine.submit(adapter=engine.loader.add("slow", load_ms=5000.0))
        quick = engine.submit(adapter=engine.loader.add("quick"))
        engine.run()
        for request_id in others:
            assert max(b - a for a, b in pairwise(engine.times_ms[request_id])) < 50.0
        assert engine.times_ms[quick][0] < 200.0
        assert engine.times_ms[slow][0] > 5000.0

    def test_the_copy_is_spread_over_steps_while_others_run(self) -> None:
        engine = EngineUnderTest(copy_bytes_per_step=EXTENT_BYTES)
        engine.submit(max_tokens=60)
        engine.step(2)
        before = len(engine.executor.plans)
        request_id = engine.submit(adapter=engine.loader.add("large", extents=12))
        while not engine.tokens(request_id):
            engine.step()
        assert len(engine.executor.plans) - before >= 12

    def test_bytes_copied_are_the_adapters_own_and_once(self) -> None:
        engine = EngineUnderTest()
        refs = [engine.loader.add(f"{n}", extents=n + 1) for n in range(3)]
        for _ in range(4):
            for ref in refs:
                engine.submit(adapter=ref)
            engine.run()
        assert engine.executor.copied_bytes == (1 + 2 + 3) * EXTENT_BYTES


class TestBudgets:
    def test_the_host_budget_drops_the_least_recently_used(self) -> None:
        engine = EngineUnderTest(host_cache_bytes=2 * EXTENT_BYTES, max_slots=1)
        refs = [engine.loader.add(name) for name in "abc"]
        for ref in refs:
            engine.submit(adapter=ref)
            engine.run()
            assert engine.core.status().host_adapter_bytes <= 2 * EXTENT_BYTES
        engine.submit(adapter=refs[1])
        engine.run()
        assert engine.loader.built == refs
        engine.submit(adapter=refs[0])
        engine.run()
        assert engine.loader.built == [*refs, refs[0]]

    def test_the_host_budget_holds_when_nothing_in_it_can_go(self) -> None:
        engine = EngineUnderTest(
            host_cache_bytes=2 * EXTENT_BYTES, max_slots=1, adapter_aging_ms=200.0
        )
        ids = [engine.submit(adapter=engine.loader.add(f"{n}"), max_tokens=40) for n in range(6)]
        while engine.core.has_work:
            engine.step()
            assert engine.core.status().host_adapter_bytes <= 2 * EXTENT_BYTES
        assert all(engine.last(request_id).finish == "length" for request_id in ids)

    def test_an_evicted_adapter_comes_back_from_host_memory(self) -> None:
        engine = EngineUnderTest(max_slots=1)
        a, b = engine.loader.add("a"), engine.loader.add("b")
        for ref in (a, b, a):
            engine.submit(adapter=ref)
            engine.run()
        assert engine.loader.built == [a, b]

    def test_an_adapter_larger_than_its_budget_is_refused_with_the_figures(self) -> None:
        engine = EngineUnderTest(extents=16)
        request_id = engine.submit(adapter=engine.loader.add("huge", extents=9))
        engine.run()
        last = engine.last(request_id)
        assert last.error_code == "adapter_too_large"
        assert str(9 * EXTENT_BYTES) in (last.error_message or "")
        assert str(8 * EXTENT_BYTES) in (last.error_message or "")
        assert engine.loader.built == []

    def test_a_rank_above_the_limit_is_refused_with_the_figures(self) -> None:
        engine = EngineUnderTest(max_rank=16)
        request_id = engine.submit(adapter=engine.loader.add("wide", rank=17))
        engine.run()
        assert engine.last(request_id).error_code == "rank_out_of_range"
        assert "17" in (engine.last(request_id).error_message or "")

    def test_a_pinned_adapter_is_neither_moved_nor_dropped(self) -> None:
        engine = EngineUnderTest(extents=16, adapter_aging_ms=1e9)
        pinned = engine.loader.add("pinned", extents=4)
        engine.submit(adapter=pinned, max_tokens=60)
        engine.step(4)
        place = engine.executor.spans()
        for n in range(6):
            engine.submit(adapter=engine.loader.add(f"{n}", extents=3), max_tokens=2)
        engine.step(30)
        assert place[0] in engine.executor.spans()
        assert residency(engine)[pinned].pins == 1

    def test_idle_adapters_are_moved_together_for_one_that_needs_the_room(self) -> None:
        engine = EngineUnderTest(extents=16)
        refs = [engine.loader.add(f"{n}", extents=2) for n in range(4)]
        for ref in refs:
            engine.submit(adapter=ref)
            engine.run()
        engine.core.forget(refs[0])
        engine.core.forget(refs[2])
        running = [engine.submit(60, max_tokens=60) for _ in range(1)]
        engine.step(2)
        engine.submit(adapter=engine.loader.add("large", extents=4))
        engine.step(4)
        tiers = {ref: residency(engine)[ref].tier for ref in (refs[1], refs[3])}
        assert set(tiers.values()) == {"device"}
        engine.run()
        assert engine.finished(running[0])


class TestQuarantine:
    def broken(self, engine: EngineUnderTest, salt: str = "aa") -> AdapterRef:
        ref = engine.loader.add("broken", salt=salt)
        return engine.loader.add(
            "broken", salt=salt, load_ms=10.0, fails=LoadFailed(ref, "non_finite", "It holds NaN.")
        )

    def test_a_broken_adapter_ends_its_requests_with_the_reason(self) -> None:
        engine = EngineUnderTest()
        ref = self.broken(engine)
        ids = [engine.submit(adapter=ref, choices=2) for _ in range(3)]
        good = engine.submit(adapter=engine.loader.add("good"))
        engine.run()
        for request_id in ids:
            assert engine.last(request_id).error_code == "non_finite"
            assert engine.last(request_id).error_message == "It holds NaN."
            engine.assert_stream_is_whole(request_id)
        assert engine.last(good).finish == "length"
        engine.assert_all_returned()

    def test_it_is_refused_until_the_quarantine_ends(self) -> None:
        engine = EngineUnderTest(quarantine_ms=1000.0)
        ref = self.broken(engine)
        engine.submit(adapter=ref)
        engine.run()
        with pytest.raises(AdapterRefused) as refusal:
            engine.submit(adapter=ref)
        assert (refusal.value.code, refusal.value.message) == ("non_finite", "It holds NaN.")
        assert residency(engine)[ref].tier == "quarantined"
        engine.clock.advance(1001.0)
        engine.submit(adapter=ref)
        engine.run()
        assert engine.loader.measured == [ref, ref]

    def test_it_holds_for_its_own_tenant_alone(self) -> None:
        engine = EngineUnderTest()
        engine.submit(adapter=self.broken(engine, salt="aa"))
        engine.run()
        same_digest = engine.loader.add("broken", salt="bb")
        request_id = engine.submit(adapter=same_digest, tenant="b")
        engine.run()
        assert engine.last(request_id).finish == "length"

    def test_a_missing_adapter_is_tried_again_soon(self) -> None:
        engine = EngineUnderTest(missing_retry_ms=100.0)
        ref = engine.loader.add("a")
        stored = engine.loader.adapters.pop(ref)
        lost = engine.submit(adapter=ref)
        engine.run()
        assert engine.last(lost).error_code == "adapter_missing"
        engine.loader.adapters[ref] = stored
        engine.clock.advance(101.0)
        request_id = engine.submit(adapter=ref)
        engine.run()
        assert engine.last(request_id).finish == "length"

    def test_a_validation_probe_gets_a_fresh_verdict(self) -> None:
        engine = EngineUnderTest()
        ref = self.broken(engine)
        engine.submit(adapter=ref)
        engine.run()
        probe = engine.submit(adapter=ref, system=True)
        engine.run()
        assert engine.last(probe).error_code == "non_finite"
        assert engine.loader.measured == [ref, ref]

    def test_one_whose_copy_fails_cannot_stop_the_engine(self) -> None:
        engine = EngineUnderTest()
        ref = engine.loader.add("a", extents=3)
        engine.executor.refuse_copy = lambda blob: blob.layout.nbytes == 3 * EXTENT_BYTES
        bad, good = engine.submit(adapter=ref), engine.submit(adapter=engine.loader.add("b"))
        engine.run()
        assert engine.last(bad).error_code == "adapter_copy_failed"
        assert engine.last(good).finish == "length"
        engine.assert_all_returned()


class TestErasure:
    def test_leaves_nothing_on_device_host_or_in_the_prefix_cache(self) -> None:
        engine = EngineUnderTest()
        ref, other = engine.loader.add("a"), engine.loader.add("b")
        for adapter in (ref, other):
            engine.submit(60, adapter=adapter)
        engine.run()
        before = engine.core.status()
        assert engine.core.forget(ref)
        after = engine.core.status()
        assert after.kv_blocks_cached == before.kv_blocks_cached // 2
        assert after.device_adapter_bytes == after.host_adapter_bytes == EXTENT_BYTES
        assert len(engine.executor.spans()) == 1

    def test_ends_what_runs_and_what_waits(self) -> None:
        engine = EngineUnderTest(max_running=1, max_choices=1)
        ref = engine.loader.add("a")
        ids = [engine.submit(adapter=ref, max_tokens=50) for _ in range(3)]
        engine.step(5)
        assert engine.core.forget(ref)
        engine.step(2)
        for request_id in ids:
            assert engine.last(request_id).error_code == "adapter_deleted"
            engine.assert_stream_is_whole(request_id)
        engine.assert_all_returned()

    @pytest.mark.parametrize("steps", [1, 5])
    def test_during_a_load_is_complete_once_the_load_is_thrown_away(self, steps: int) -> None:
        engine = EngineUnderTest()
        ref = engine.loader.add("a", load_ms=60.0)
        engine.submit(adapter=ref)
        while len(engine.loader.built) < steps - 4 or not engine.loader.measured:
            engine.step()
        assert not engine.core.forget(ref)
        engine.run()
        assert engine.core.forget(ref)
        status = engine.core.status()
        assert (status.device_adapter_bytes, status.host_adapter_bytes) == (0, 0)
        engine.assert_all_returned()

    def test_refuses_what_was_on_its_way_and_later_takes_a_new_upload(self) -> None:
        engine = EngineUnderTest()
        ref = engine.loader.add("a")
        engine.core.forget(ref)
        with pytest.raises(AdapterRefused) as refusal:
            engine.submit(adapter=ref)
        assert refusal.value.code == "adapter_deleted"
        probe = engine.submit(adapter=ref, system=True)
        engine.run()
        assert engine.last(probe).finish == "length"
        request_id = engine.submit(adapter=ref)
        engine.run()
        assert engine.last(request_id).finish == "length"


class TestLeaks:
    def test_a_thousand_loads_and_erasures_leave_every_table_flat(self) -> None:
        engine = EngineUnderTest(extents=32)
        for n in range(1000):
            ref = engine.loader.add(f"{n}", extents=1 + n % 3)
            engine.submit(20, adapter=ref, max_tokens=1)
            engine.run()
            assert engine.core.forget(ref)
            engine.clock.advance(10_000.0)
        engine.assert_all_returned()
        status = engine.core.status()
        assert status.adapters == []
        assert (status.kv_blocks_cached, status.host_adapter_bytes) == (0, 0)
        pool = engine.core._pool
        assert pool._entries == {}
        assert len(pool._quarantine._entries) < 1100
        assert len(pool._device._free_slots) == engine.config.max_slots

    def test_a_thousand_adapters_through_a_small_pool_stay_within_its_budgets(self) -> None:
        engine = EngineUnderTest(extents=24, host_cache_bytes=8 * EXTENT_BYTES, max_slots=5)
        for n in range(1000):
            engine.submit(20, adapter=engine.loader.add(f"{n}", extents=1 + n % 4), max_tokens=1)
            engine.run()
        status = engine.core.status()
        assert status.host_adapter_bytes <= 8 * EXTENT_BYTES
        assert len(engine.core._pool._entries) <= 8 + 5
        engine.assert_all_returned()
