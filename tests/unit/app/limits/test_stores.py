"""Both stores keep one contract; Redis besides is shared by processes."""

import asyncio
import secrets
from collections.abc import AsyncIterator

import pytest

from app.clock import FrozenClock
from app.limits.memory_store import MemoryLimitStore
from app.limits.redis_store import RedisLimitStore
from app.limits.store import Claim, LimitStore, Seat, Window

REDIS_URL = "redis://127.0.0.1:6379/0"


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
async def store(request: pytest.FixtureRequest, clock: FrozenClock) -> AsyncIterator[LimitStore]:
    if request.param == "memory":
        yield MemoryLimitStore(clock)
        return
    opened = RedisLimitStore(REDIS_URL, prefix=f"test-{secrets.token_hex(6)}")
    yield opened
    await opened.close()


def claim(request_id: str, *, tokens: int = 10, limit: int = 100, seats: int = 0) -> Claim:
    return Claim(
        group="ten_1",
        request_id=request_id,
        windows=(
            Window("requests", "ten_1:requests", 1000, 1),
            Window("tokens", "ten_1:tokens", limit, tokens),
        ),
        seats=(Seat("ten_1:seats", seats),) if seats else (),
    )


async def taken_seats(store: LimitStore) -> int:
    return (await store.peek(claim("peek", seats=9))).seats[0].used


class TestReserve:
    async def test_a_call_that_fits_takes_its_units(self, store):
        decision = await store.reserve(claim("a", tokens=40), 60_000)
        assert decision.admitted
        assert [level.remaining for level in decision.levels] == [999, 60]
        assert all(0 < level.reset_ms <= 62_000 for level in decision.levels)

    async def test_a_refused_call_takes_nothing_from_any_window(self, store):
        await store.reserve(claim("a", tokens=90), 60_000)
        refused = await store.reserve(claim("b", tokens=20), 60_000)
        assert refused.refused_by == "tokens"
        assert 0 < refused.wait_ms <= 62_000
        seen = await store.peek(claim("peek", tokens=0))
        assert [level.used for level in seen.levels] == [1, 90]

    async def test_fifty_at_once_never_pass_the_limit(self, store):
        decisions = await asyncio.gather(
            *(store.reserve(claim(f"r{i}", tokens=10), 60_000) for i in range(50))
        )
        assert sum(decision.admitted for decision in decisions) == 10

    async def test_a_full_house_refuses_and_an_empty_seat_admits(self, store):
        first = claim("a", seats=1)
        taken = await store.reserve(first, 60_000)
        refused = await store.reserve(claim("b", seats=1), 60_000)
        assert refused.refused_by == "concurrency"
        assert refused.wait_ms >= 1000
        await store.settle(first, taken.slot, (0, 0))
        assert (await store.reserve(claim("b", seats=1), 60_000)).admitted
        assert await taken_seats(store) == 1


class TestSettle:
    async def test_unused_units_come_back(self, store):
        call = claim("a", tokens=90)
        taken = await store.reserve(call, 60_000)
        await store.settle(call, taken.slot, (0, 75))
        seen = await store.peek(claim("peek"))
        assert [level.used for level in seen.levels] == [1, 15]

    async def test_giving_back_twice_never_goes_below_zero(self, store):
        call = claim("a", tokens=10)
        taken = await store.reserve(call, 60_000)
        for _ in range(3):
            await store.settle(call, taken.slot, (1, 10))
        assert [level.used for level in (await store.peek(call)).levels] == [0, 0]
        await store.reserve(call, 60_000)
        assert [level.used for level in (await store.peek(call)).levels] == [1, 10]


class TestLeases:
    async def test_a_seat_that_nobody_renews_is_free_again(self, store, clock):
        await store.reserve(claim("a", seats=1), 40)
        await asyncio.sleep(0.06)  # Redis counts by its own clock
        clock.advance(seconds=0.06)
        assert await taken_seats(store) == 0
        assert (await store.reserve(claim("b", seats=1), 60_000)).admitted

    async def test_a_renewed_seat_is_kept(self, store, clock):
        await store.reserve(claim("a", seats=1), 200)
        await store.renew([("ten_1:seats", "a"), ("ten_1:seats", "never-held")], 60_000)
        await asyncio.sleep(0.25)
        clock.advance(seconds=0.25)
        assert await taken_seats(store) == 1


@pytest.mark.redis
class TestTwoProcesses:
    async def test_two_api_processes_share_one_limit(self):
        prefix = f"test-{secrets.token_hex(6)}"
        one, other = (RedisLimitStore(REDIS_URL, prefix=prefix) for _ in range(2))
        try:
            decisions = await asyncio.gather(
                *((one, other)[i % 2].reserve(claim(f"r{i}", tokens=10), 60_000) for i in range(40))
            )
        finally:
            await one.close()
            await other.close()
        assert sum(decision.admitted for decision in decisions) == 10
