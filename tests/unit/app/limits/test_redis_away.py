"""Redis gone, back, and back without its memory: no limit is passed, and nobody waits for long."""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from app.limits import redis_store
from app.limits.redis_store import RedisLimitStore
from app.limits.store import Claim, Seat, StoreAway, Window
from tests.own_redis import OwnRedis

pytestmark = [
    pytest.mark.redis,
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server here"),
]
LIMIT = 100


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waits of the real rule, in small."""
    monkeypatch.setattr(redis_store, "PROBE_MS", 20.0)
    monkeypatch.setattr(redis_store, "GRACE_MS", 250.0)


@pytest.fixture
def redis(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[OwnRedis]:
    server = OwnRedis(tmp_path / "redis", persistent=getattr(request, "param", False)).start()
    yield server
    server.kill()


@pytest.fixture
async def stores(redis: OwnRedis) -> AsyncIterator[list[RedisLimitStore]]:
    """Those of two api processes, both at work."""
    opened = [RedisLimitStore(redis.url) for _ in range(2)]
    for store in opened:
        await store.start()
        await admitted_again(store)
    yield opened
    for store in opened:
        await store.close()


def claim(request_id: str, tokens: int = 10) -> Claim:
    return Claim(
        "ten_1",
        request_id,
        (Window("tokens", "ten_1:tokens", LIMIT, tokens),),
        (Seat("ten_1:seats", 50),),
    )


async def admitted_again(store: RedisLimitStore, within_s: float = 5.0) -> int:
    """Waits as it is told to; the tokens in use, as the store then says."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            return (await store.peek(claim("peek", 0))).levels[0].used
        except StoreAway as away:
            await asyncio.sleep(away.retry_after_ms / 1000)
    raise AssertionError("the store did not come back")


async def take(store: RedisLimitStore, *names: str) -> list[int]:
    """Reserves ten tokens for each; the slots."""
    decisions = [await store.reserve(claim(name), 60_000) for name in names]
    assert all(decision.admitted for decision in decisions)
    return [decision.slot for decision in decisions]


async def test_calls_are_refused_at_once_while_redis_is_gone(redis, stores):
    redis.kill()
    with pytest.raises(StoreAway):
        await stores[0].reserve(claim("a"), 60_000)
    began = time.monotonic()
    for _ in range(50):
        with pytest.raises(StoreAway) as refusal:
            await stores[0].reserve(claim("a"), 60_000)
        assert refusal.value.retry_after_ms > 0
    assert time.monotonic() - began < 1.0


async def test_what_every_process_admitted_counts_again_after_redis_lost_its_memory(redis, stores):
    await take(stores[0], "a", "b", "c")
    await take(stores[1], "d", "e")
    redis.kill()
    redis.start()
    assert await admitted_again(stores[0]) == 50
    assert await admitted_again(stores[1]) == 50
    assert (await stores[0].peek(claim("peek", 0))).seats[0].used == 5


async def test_nobody_is_admitted_before_all_have_said_what_they_admitted(redis, stores):
    await take(stores[0], *(f"a{index}" for index in range(9)))
    redis.kill()
    redis.start()
    decisions = []
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:  # a process that admitted nothing itself, and cannot wait
        try:
            decisions.append(await stores[1].reserve(claim(f"b{len(decisions)}"), 60_000))
        except StoreAway:
            await asyncio.sleep(0.005)
    assert sum(decision.admitted for decision in decisions) == 1


async def test_a_process_that_starts_then_waits_for_the_others_too(redis, stores):
    await take(stores[0], *(f"a{index}" for index in range(10)))
    redis.kill()
    redis.start()
    fresh = RedisLimitStore(redis.url)
    try:
        assert await admitted_again(fresh) == LIMIT
    finally:
        await fresh.close()


async def test_what_settled_meanwhile_is_not_counted_again(redis, stores):
    slots = await take(stores[0], "a", "b")
    redis.kill()
    with pytest.raises(StoreAway):
        await stores[0].peek(claim("peek", 0))
    await stores[0].settle(claim("a"), slots[0], (7,))
    redis.start()
    assert await admitted_again(stores[0]) == 13
    assert (await stores[0].peek(claim("peek", 0))).seats[0].used == 1


@pytest.mark.parametrize("redis", [True], indirect=True)
async def test_a_redis_that_kept_its_memory_gets_the_settlements_that_waited(redis, stores):
    slots = await take(stores[0], "a", "b")
    redis.kill()
    with pytest.raises(StoreAway):
        await stores[0].peek(claim("peek", 0))
    await stores[0].settle(claim("a"), slots[0], (7,))
    redis.start()
    assert await admitted_again(stores[0]) == 13


async def test_an_idle_process_notices_and_tells(redis, stores):
    await take(stores[0], "a")
    redis.kill()
    redis.start()
    await asyncio.sleep(0.2)  # nobody calls
    assert await admitted_again(stores[1]) == 10


async def test_a_forgotten_memory_is_noticed_without_a_lost_connection(redis, stores):
    await take(stores[0], "a", "b")
    await stores[1]._redis.flushall()
    with pytest.raises(StoreAway):
        await stores[0].reserve(claim("c"), 60_000)
    assert await admitted_again(stores[0]) == 20
