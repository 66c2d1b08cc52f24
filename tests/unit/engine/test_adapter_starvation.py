"""More adapters than fit: everybody is served, in turn, within a bound."""

import statistics
from itertools import pairwise

import pytest

from engine.types import AdapterRef
from tests.engine_under_test import EngineUnderTest
from tests.fakes import EXTENT_BYTES, expected_tokens


def keep_busy(engine: EngineUnderTest, refs: list[AdapterRef], max_tokens: int = 8) -> None:
    """At least two unfinished requests for each adapter: the running set is always refilled."""
    for ref in refs:
        mine = [c for c in engine.core._calls.values() if c.request.adapter == ref]
        for _ in range(2 - len(mine)):
            engine.submit(adapter=ref, max_tokens=max_tokens, tenant=ref.salt)


class TestMoreAdaptersThanSlots:
    @pytest.mark.parametrize("slots", [1, 3, 8])
    def test_one_more_than_there_are_slots_all_finish(self, slots: int) -> None:
        engine = EngineUnderTest(max_slots=slots)
        refs = [engine.loader.add(f"{n}") for n in range(slots + 1)]
        ids = [engine.submit([5] * 20, adapter=ref, max_tokens=20) for ref in refs]
        engine.run()
        for request_id, ref in zip(ids, refs, strict=True):
            expected = expected_tokens([5] * 20, 20, blob=engine.loader.blob(ref))
            assert engine.tokens(request_id) == expected
        engine.assert_all_returned()

    def test_an_adapter_is_not_shut_out_by_a_running_set_that_is_refilled(self) -> None:
        engine = EngineUnderTest(max_slots=3, adapter_aging_ms=500.0)
        resident = [engine.loader.add(f"{n}") for n in range(3)]
        for _ in range(20):
            keep_busy(engine, resident)
            engine.step()
        outsider = engine.submit(adapter=engine.loader.add("outsider"), max_tokens=4)
        started = engine.clock.now_ms()
        while not engine.finished(outsider):
            keep_busy(engine, resident)
            engine.step()
            assert engine.clock.now_ms() - started < 1000.0

    def test_six_busy_adapters_in_three_slots_take_turns(self) -> None:
        engine = EngineUnderTest(max_slots=3, adapter_aging_ms=300.0)
        refs = [engine.loader.add(f"{n}", salt=f"{n}") for n in range(6)]
        while engine.clock.now_ms() < 20_000.0:
            keep_busy(engine, refs)
            engine.step()
        waits: dict[str, list[float]] = {ref.salt: [] for ref in refs}
        for request_id, events in engine.outputs.items():
            usage = events[-1].usage
            if usage is not None and usage.ttft_ms is not None:
                waits[engine.tenants[request_id]].append(usage.ttft_ms)
        served = [len(mine) for mine in waits.values()]
        assert min(served) > 20
        assert max(served) < 1.5 * min(served)
        everything = [wait for mine in waits.values() for wait in mine]
        assert max(everything) < 3_000.0
        assert statistics.median(everything) < 1_000.0

    def test_a_backlog_for_a_resident_adapter_does_not_keep_another_out(self) -> None:
        engine = EngineUnderTest(max_slots=1, max_running=2, max_choices=1, adapter_aging_ms=200.0)
        first = engine.loader.add("first")
        backlog = [engine.submit(adapter=first, max_tokens=20) for _ in range(20)]
        other = engine.submit(adapter=engine.loader.add("other"), tenant="b")
        engine.run()
        before = [r for r in backlog if engine.times_ms[r][0] < engine.times_ms[other][0]]
        assert len(before) < 10

    def test_a_place_that_is_to_be_left_serves_nobody_new(self) -> None:
        engine = EngineUnderTest(max_slots=1, adapter_aging_ms=100.0)
        first = engine.loader.add("first")
        running = engine.submit(adapter=first, max_tokens=40)
        engine.step(4)
        other = engine.submit(adapter=engine.loader.add("other"))
        engine.step(15)
        late = engine.submit(adapter=first)
        engine.run()
        order = sorted((running, other, late), key=lambda r: engine.times_ms[r][0])
        assert order == [running, other, late]


class TestRoom:
    def test_one_that_cannot_fit_yet_does_not_hold_up_the_others(self) -> None:
        engine = EngineUnderTest(extents=32, adapter_aging_ms=1e9)
        pinned = engine.loader.add("pinned", extents=10)
        small = engine.loader.add("small", extents=1)
        engine.submit(adapter=pinned, max_tokens=100)
        engine.step(4)
        large = engine.submit(adapter=engine.loader.add("large", extents=12), tenant="b")
        quick = engine.submit(adapter=small, tenant="c")
        base = engine.submit(tenant="d")
        engine.step(10)
        assert engine.finished(quick)
        assert engine.finished(base)
        assert not engine.finished(large)
        engine.run()
        assert engine.finished(large)

    def test_a_large_adapter_gets_its_turn_among_many_small_ones(self) -> None:
        engine = EngineUnderTest(extents=32, adapter_aging_ms=300.0)
        small = [engine.loader.add(f"{n}", extents=2) for n in range(8)]
        for _ in range(20):
            keep_busy(engine, small)
            engine.step()
        large = engine.submit(adapter=engine.loader.add("large", extents=14))
        started = engine.clock.now_ms()
        while not engine.finished(large):
            keep_busy(engine, small)
            engine.step()
            assert engine.clock.now_ms() - started < 2_000.0

    def test_an_adapter_gets_room_that_kv_blocks_of_running_requests_occupy(self) -> None:
        engine = EngineUnderTest(extents=20, adapter_aging_ms=200.0, max_running=6)
        for _ in range(20):
            while engine.core.status().waiting < 3:
                engine.submit(30, max_tokens=40)
            engine.step()
        request_id = engine.submit(adapter=engine.loader.add("a", extents=9), tenant="b")
        started = engine.clock.now_ms()
        while not engine.finished(request_id):
            while engine.core.status().waiting < 3:
                engine.submit(30, max_tokens=40)
            engine.step()
            assert engine.clock.now_ms() - started < 5_000.0

    def test_when_its_requests_go_away_the_room_is_given_back(self) -> None:
        engine = EngineUnderTest(max_slots=1, adapter_aging_ms=100.0)
        first = engine.loader.add("first")
        engine.submit(adapter=first, max_tokens=100)
        engine.step(4)
        impatient = engine.submit(adapter=engine.loader.add("other"))
        engine.step(15)
        late = engine.submit(adapter=first)
        engine.step(3)
        assert not engine.tokens(late)
        engine.core.cancel(impatient)
        engine.step(4)
        assert engine.tokens(late)


class TestLoadsAndPlaces:
    def test_one_tenants_flood_of_cold_adapters_does_not_keep_anothers_from_loading(self) -> None:
        engine = EngineUnderTest(extents=400, max_slots=128, max_loads=2)
        for n in range(60):
            engine.submit(adapter=engine.loader.add(f"{n}", load_ms=100.0), tenant="flood")
        engine.step(3)
        modest = engine.submit(adapter=engine.loader.add("m", load_ms=100.0), tenant="modest")
        began = engine.clock.now_ms()
        while not engine.finished(modest):
            engine.step()
            assert engine.clock.now_ms() - began < 600.0

    def test_while_a_load_takes_seconds_everybody_elses_tokens_come_as_before(self) -> None:
        engine = EngineUnderTest(extents=100)
        chat = engine.submit(tenant="chat", max_tokens=600)
        engine.step(3)
        slow = engine.loader.add("slow", load_ms=5_000.0)
        waiting = engine.submit(adapter=slow, tenant="cold")
        engine.run()
        assert max(b - a for a, b in pairwise(engine.times_ms[chat])) < 50.0
        assert engine.times_ms[waiting][0] >= 5_000.0

    def test_places_do_not_change_hands_faster_than_copies_are_worth(self) -> None:
        """Two busy adapters, one place, and a copy that takes ten steps."""
        engine = EngineUnderTest(
            max_slots=1, adapter_aging_ms=10.0, copy_bytes_per_step=100, extents=200
        )
        refs = [engine.loader.add(f"{n}", salt=f"{n}", extents=1) for n in range(2)]
        engine.submit(tenant="base", max_tokens=1000)  # somebody's tokens, so copies are spread
        while engine.clock.now_ms() < 10_000.0:
            keep_busy(engine, refs)
            engine.step()
        copies = engine.executor.copied_bytes / EXTENT_BYTES
        assert copies * 11 * 10.0 < 0.5 * 10_000.0
        assert copies > 8  # and they do take turns

    def test_the_wait_for_a_place_is_not_as_long_as_the_longest_answer(self) -> None:
        engine = EngineUnderTest(max_slots=1, adapter_aging_ms=20.0, extents=150)
        first = engine.submit(adapter=engine.loader.add("first"), max_tokens=800)
        engine.step(5)
        other = engine.submit(adapter=engine.loader.add("other"), tenant="b")
        began = engine.clock.now_ms()
        while not engine.finished(other):
            engine.step()
            assert engine.clock.now_ms() - began < 1_300.0
        engine.run()
        assert len(engine.tokens(first)) == 800

    @pytest.mark.parametrize("adapters", [6, 12])
    def test_twice_as_many_adapters_as_places_cost_little_of_the_time_to_the_first_token(
        self, adapters: int
    ) -> None:
        def median_ttft_ms(places: int) -> float:
            engine = EngineUnderTest(max_slots=places, extents=200, max_running=16)
            refs = [engine.loader.add(f"{n}", load_ms=20.0) for n in range(adapters)]
            for n in range(300):
                engine.submit(adapter=refs[n * 7 % adapters], tenant=f"{n % 5}", max_tokens=8)
                engine.step(4)
            engine.run()
            usages = [engine.last(request_id).usage for request_id in engine.outputs]
            return statistics.median(u.ttft_ms for u in usages if u and u.ttft_ms is not None)

        assert median_ttft_ms(adapters // 2) <= 1.5 * median_ttft_ms(adapters)
