"""A tenant's adapters hold no more than its limit; what it has reserved is not taken from it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.adapters.resident_bytes import RESERVED_SHARE, ResidentPromises, TierBytes
from engine.errors import AdapterRefused, RequestRefused
from engine.types import AdapterRef, ResidentBytes
from tests.engine_under_test import EngineUnderTest
from tests.fakes import EXTENT_BYTES, expected_tokens


def extents(most: int | None = None, reserved: int = 0) -> ResidentBytes:
    return ResidentBytes(None if most is None else most * EXTENT_BYTES, reserved * EXTENT_BYTES)


def on_device(engine: EngineUnderTest, salt: str) -> set[AdapterRef]:
    adapters = engine.core.status().adapters
    return {a.adapter for a in adapters if a.adapter.salt == salt and a.tier == "device"}


def held(engine: EngineUnderTest, tenant: str) -> tuple[int, int]:
    """Extents of a tenant's adapters on the device and on the host."""
    found = engine.core.status().resident.get(tenant)
    if found is None:
        return (0, 0)
    return (found.device_bytes // EXTENT_BYTES, found.host_bytes // EXTENT_BYTES)


class TestLimit:
    def test_of_more_adapters_than_the_limit_holds_all_are_served_in_turn(self) -> None:
        engine = EngineUnderTest(adapter_aging_ms=100.0)
        refs = [engine.loader.add(f"{n}", salt="a", extents=2) for n in range(5)]
        ids = [
            engine.submit([5] * 20, adapter=ref, max_tokens=30, resident=extents(4)) for ref in refs
        ]
        most = (0, 0)
        while engine.core.has_work:
            engine.step()
            most = max(most, held(engine, "a"))
            assert max(held(engine, "a")) <= 4
        assert most[0] == 4
        for request_id, ref in zip(ids, refs, strict=True):
            expected = expected_tokens([5] * 20, 30, blob=engine.loader.blob(ref))
            assert engine.tokens(request_id) == expected
        engine.assert_all_returned()

    def test_a_tenant_at_its_limit_pushes_nobody_out(self) -> None:
        engine = EngineUnderTest(max_slots=4, adapter_aging_ms=100.0)
        others = [engine.loader.add(f"other {n}", salt="b") for n in range(3)]
        for ref in others:
            engine.submit(adapter=ref, tenant="b")
            engine.run()
        for n in range(12):
            cold = engine.loader.add(f"cold {n}", salt="a")
            engine.submit(adapter=cold, max_tokens=20, resident=extents(1))
        engine.run()
        assert on_device(engine, "b") == set(others)
        assert len(on_device(engine, "a")) == 1

    def test_an_adapter_that_is_in_use_all_the_time_makes_way_for_the_tenants_next(self) -> None:
        engine = EngineUnderTest(adapter_aging_ms=200.0)
        busy, next_one = (engine.loader.add(name, salt="a") for name in ("busy", "next"))
        waiting = None
        while waiting is None or not engine.finished(waiting):
            if len(engine.core._calls) < 4:
                engine.submit(adapter=busy, max_tokens=8, resident=extents(1))
            engine.step()
            if waiting is None and engine.clock.now_ms() > 300.0:
                waiting = engine.submit(adapter=next_one, max_tokens=4, resident=extents(1))
            assert engine.clock.now_ms() < 3_000.0

    def test_waiting_at_the_limit_keeps_nobody_else_waiting(self) -> None:
        engine = EngineUnderTest(max_slots=8)
        for n in range(40):
            cold = engine.loader.add(f"cold {n}", salt="a")
            engine.submit(adapter=cold, max_tokens=200, resident=extents(1))
        engine.step(5)
        other = engine.submit(adapter=engine.loader.add("b", salt="b"), tenant="b")
        began_ms = engine.clock.now_ms()
        while not engine.finished(other):
            engine.step()
        assert engine.clock.now_ms() - began_ms < 250.0

    def test_a_cancelled_request_gives_the_adapter_that_made_way_its_place_back(self) -> None:
        engine = EngineUnderTest(adapter_aging_ms=50.0)
        first, second = (engine.loader.add(name, salt="a") for name in ("first", "second"))
        engine.submit(adapter=first, max_tokens=60, resident=extents(1))
        engine.step(4)
        other = engine.submit(adapter=second, resident=extents(1))
        engine.step(12)
        late = engine.submit(adapter=first, resident=extents(1))
        engine.step(3)
        assert not engine.tokens(late)
        engine.core.cancel(other)
        engine.run()
        assert engine.last(late).finish == "length"

    def test_a_limit_lowered_while_an_adapter_waits_for_host_memory_refuses_it(self) -> None:
        engine = EngineUnderTest(max_slots=1, host_cache_bytes=4 * EXTENT_BYTES)
        first, second = (engine.loader.add(name, salt="a", extents=3) for name in ("1", "2"))
        engine.submit(adapter=first, max_tokens=100, tenant="a")
        engine.step(4)
        engine.submit(adapter=second, tenant="a")
        engine.step(4)
        large = engine.loader.add("large", salt="b", extents=3)
        waiting = engine.submit(adapter=large, tenant="b")
        engine.step(2)
        small = engine.loader.add("small", salt="b")
        fitting = engine.submit(adapter=small, tenant="b", resident=extents(2))
        engine.run()
        assert engine.last(waiting).error_code == "adapter_exceeds_resident_bytes"
        assert len(engine.tokens(fitting)) == 4
        engine.assert_all_returned()

    def test_one_adapter_above_the_limit_is_refused_and_a_higher_limit_lifts_it(self) -> None:
        engine = EngineUnderTest()
        ref = engine.loader.add("large", salt="a", extents=3)
        refused = engine.submit(adapter=ref, resident=extents(2))
        engine.run()
        assert engine.last(refused).error_code == "adapter_exceeds_resident_bytes"
        assert str(3 * EXTENT_BYTES) in (engine.last(refused).error_message or "")
        with pytest.raises(AdapterRefused) as again:
            engine.submit(adapter=ref, resident=extents(2))
        assert again.value.code == "adapter_exceeds_resident_bytes"
        allowed = engine.submit(adapter=ref, resident=extents(3))
        engine.run()
        assert engine.last(allowed).finish == "length"
        with pytest.raises(AdapterRefused):  # it is resident, and the limit is lower again
            engine.submit(adapter=ref, resident=extents(2))

    @pytest.mark.parametrize("promise", [ResidentBytes(0, 0), ResidentBytes(None, -1)])
    def test_a_limit_that_is_none_is_refused(self, promise: ResidentBytes) -> None:
        with pytest.raises(RequestRefused) as refused:
            EngineUnderTest().submit(resident=promise)
        assert refused.value.code == "out_of_range"


class TestReservation:
    def test_cold_adapters_of_others_do_not_push_out_what_is_reserved(self) -> None:
        engine = EngineUnderTest(max_slots=8, adapter_aging_ms=100.0, extents=16)
        mine = [engine.loader.add(f"mine {n}", salt="a") for n in range(3)]
        for ref in mine:
            engine.submit(adapter=ref, resident=extents(reserved=3))
            engine.run()
        for n in range(30):
            cold = engine.loader.add(f"cold {n}", salt="b", extents=2)
            engine.submit(adapter=cold, tenant="b", max_tokens=20)
        while engine.core.has_work:
            engine.step()
            assert on_device(engine, "a") == set(mine)
        assert engine.core.status().evictions_total > 20

    def test_without_one_they_are(self) -> None:
        engine = EngineUnderTest(max_slots=8, extents=16)
        mine = engine.loader.add("mine", salt="a")
        engine.run_until_resident(mine)
        for n in range(30):
            engine.submit(adapter=engine.loader.add(f"cold {n}", salt="b", extents=2), tenant="b")
        engine.run()
        assert not on_device(engine, "a")

    def test_host_memory_keeps_it_as_well(self) -> None:
        engine = EngineUnderTest(host_cache_bytes=6 * EXTENT_BYTES, max_slots=2)
        mine = engine.loader.add("mine", salt="a", extents=2)
        engine.submit(adapter=mine, resident=extents(reserved=2))
        engine.run()
        for n in range(10):
            engine.submit(adapter=engine.loader.add(f"cold {n}", salt="b"), tenant="b")
            engine.run()
            assert held(engine, "a")[1] == 2

    def test_an_adapter_that_fits_nowhere_else_gets_the_place_once_it_has_waited(self) -> None:
        engine = EngineUnderTest(extents=16, max_slots=16, adapter_aging_ms=100.0)
        for n in range(4):
            ref = engine.loader.add(f"mine {n}", salt="a")
            engine.submit(adapter=ref, resident=extents(reserved=8))
            engine.run()
        large = engine.submit(adapter=engine.loader.add("b", salt="b", extents=7), tenant="b")
        engine.run()
        assert engine.last(large).finish == "length"
        assert 100.0 < engine.times_ms[large][0] < 1_000.0 + engine.times_ms["r1"][0]

    def test_all_reservations_together_are_at_most_half_of_a_tier(self) -> None:
        promises = ResidentPromises()
        for salt, reserved in (("a", 600), ("b", 200)):
            promises.joined(salt, salt)
            promises.tell(salt, salt, ResidentBytes(None, reserved))
        assert [promises.reserved(salt, 800) for salt in "ab"] == [300, 100]
        assert [promises.reserved(salt, 8000) for salt in "ab"] == [600, 200]
        promises.left("a")
        assert promises.reserved("b", 800) == 200


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=12), st.integers(1, 20_000))
def test_what_is_kept_from_others_never_exceeds_the_reserved_share(
    reservations: list[int], capacity: int
) -> None:
    promises = ResidentPromises()
    tier = TierBytes(capacity, promises)
    for n, reserved in enumerate(reservations):
        promises.joined(f"{n}", f"{n}")
        promises.tell(f"{n}", f"{n}", ResidentBytes(None, reserved))
        tier.take(f"{n}", max(1, reserved // 2))
    kept = sum(tier.held(f"{n}") for n in range(len(reservations)) if tier.keeps(f"{n}"))
    assert kept <= RESERVED_SHARE * capacity


@settings(max_examples=25, deadline=None)
@given(
    st.lists(  # tenant, adapter, extents, tokens, steps until the next
        st.tuples(
            st.integers(0, 2),
            st.integers(0, 3),
            st.integers(1, 3),
            st.integers(1, 25),
            st.integers(0, 6),
        ),
        min_size=1,
        max_size=14,
    ),
    st.tuples(*[st.integers(3, 8)] * 3),
    st.tuples(*[st.integers(0, 6)] * 3),
    st.integers(1, 5),
)
def test_limits_hold_in_every_step_and_everybody_is_served(
    calls: list[tuple[int, int, int, int, int]],
    limits: tuple[int, int, int],
    reserved: tuple[int, int, int],
    slots: int,
) -> None:
    engine = EngineUnderTest(
        extents=20, max_slots=slots, host_cache_bytes=12 * EXTENT_BYTES, adapter_aging_ms=80.0
    )
    refs: dict[tuple[int, int], AdapterRef] = {}

    def step() -> None:
        engine.step()
        status = engine.core.status()
        assert status.device_adapter_bytes <= 10 * EXTENT_BYTES
        assert status.host_adapter_bytes <= 12 * EXTENT_BYTES
        for n, most in enumerate(limits):
            assert max(held(engine, f"t{n}")) <= most

    for tenant, adapter, size, tokens, pause in calls:
        key = (tenant, adapter)
        if key not in refs:
            refs[key] = engine.loader.add(f"{adapter}", salt=f"s{tenant}", extents=size)
        engine.submit(
            adapter=refs[key],
            tenant=f"t{tenant}",
            max_tokens=tokens,
            resident=extents(limits[tenant], reserved[tenant]),
        )
        for _ in range(pause):
            step()
    for _ in range(6000):
        if not engine.core.has_work:
            break
        step()
    assert all(engine.last(request_id).finish == "length" for request_id in engine.tenants)
    engine.assert_all_returned()
