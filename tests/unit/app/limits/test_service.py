"""Limits as a caller meets them."""

import pytest

from app.caller import Caller, KeyLimits, TenantLimits
from app.clock import FrozenClock
from app.errors import InvalidRequest, Overloaded, RateLimited
from app.limits.memory_store import MemoryLimitStore
from app.limits.redis_store import RedisLimitStore
from app.limits.service import Limits, limit_headers


def caller(key_id: str = "key_1", key_limits: KeyLimits | None = None, **limits: object) -> Caller:
    return Caller(
        tenant_id="ten_1",
        tenant_name="acme",
        tenant_salt="5a" * 16,
        role="api_key",
        key_id=key_id,
        limits=TenantLimits(**limits),  # type: ignore[arg-type]
        key_limits=key_limits or KeyLimits(),
    )


@pytest.fixture
def limits(clock: FrozenClock) -> Limits:
    return Limits(MemoryLimitStore(clock))


async def test_obeying_retry_after_succeeds(limits, clock):
    who = caller(requests_per_minute=3)
    for index in range(3):
        await limits.reserve(who, f"r{index}", 1)
    with pytest.raises(RateLimited) as refusal:
        await limits.reserve(who, "r3", 1)
    assert refusal.value.code == "requests_per_minute_exceeded"
    wait_s = int(refusal.value.headers()["Retry-After"])
    assert wait_s >= 1
    clock.advance(seconds=wait_s)
    await limits.reserve(who, "r3", 1)


async def test_a_call_above_the_whole_limit_is_refused_for_good(limits):
    with pytest.raises(InvalidRequest) as refusal:
        await limits.reserve(caller(tokens_per_minute=100), "r", 101)
    assert refusal.value.code == "exceeds_tokens_per_minute"
    assert refusal.value.headers() == {"x-should-retry": "false"}


async def test_what_was_not_used_can_be_used_by_the_next_call(limits):
    who = caller(tokens_per_minute=100)
    held, _ = await limits.reserve(who, "a", 90)
    with pytest.raises(RateLimited):
        await limits.reserve(who, "b", 50)
    await limits.settle(held, tokens=20, refund_request=False)
    _, decision = await limits.reserve(who, "b", 50)
    assert limit_headers(decision)["x-ratelimit-remaining-tokens"] == "30"


async def test_a_failed_call_costs_neither_tokens_nor_a_request(limits):
    who = caller(requests_per_minute=1, tokens_per_minute=100)
    held, _ = await limits.reserve(who, "a", 90)
    await limits.settle(held, tokens=0, refund_request=True)
    await limits.reserve(who, "b", 90)


async def test_one_key_at_its_limit_leaves_the_tenants_other_keys_alone(limits):
    tight = caller("key_tight", KeyLimits(tokens_per_minute=50), tokens_per_minute=1000)
    await limits.reserve(tight, "a", 50)
    with pytest.raises(RateLimited):
        await limits.reserve(tight, "b", 10)
    await limits.reserve(caller("key_other", tokens_per_minute=1000), "c", 500)


async def test_keys_of_one_tenant_share_the_tenants_limit(limits):
    await limits.reserve(caller("key_1", tokens_per_minute=100), "a", 60)
    with pytest.raises(RateLimited):
        await limits.reserve(caller("key_2", tokens_per_minute=100), "b", 60)


async def test_headers_show_the_tightest_of_tenant_and_key(limits):
    who = caller("key_1", KeyLimits(requests_per_minute=5), requests_per_minute=100)
    _, decision = await limits.reserve(who, "a", 1)
    headers = limit_headers(decision)
    assert headers["x-ratelimit-limit-requests"] == "5"
    assert headers["x-ratelimit-remaining-requests"] == "4"
    assert headers["x-ratelimit-reset-requests"].endswith("s")


async def test_a_concurrency_refusal_names_the_limit_and_passes_when_one_ends(limits):
    who = caller(max_concurrent=1)
    held, _ = await limits.reserve(who, "a", 1)
    with pytest.raises(RateLimited, match="1 requests are already running") as refusal:
        await limits.reserve(who, "b", 1)
    assert refusal.value.headers()["Retry-After"] == "1"
    assert "of your tenant; wait for one to end" in refusal.value.message
    assert "ask for a higher limit" in refusal.value.message
    await limits.settle(held, tokens=1, refund_request=False)
    await limits.reserve(who, "b", 1)


async def test_a_concurrency_refusal_says_whose_limit_it_is(limits):
    who = caller("key_1", KeyLimits(max_concurrent=1), max_concurrent=5)
    await limits.reserve(who, "a", 1)
    with pytest.raises(RateLimited, match="running, which is the limit of this key"):
        await limits.reserve(who, "b", 1)


async def test_without_redis_nothing_is_admitted_and_the_caller_may_retry():
    away = Limits(RedisLimitStore("redis://127.0.0.1:1/0"))
    who = caller(requests_per_minute=5)
    for _ in range(2):
        with pytest.raises(Overloaded) as refusal:
            await away.reserve(who, "a", 1)
        assert refusal.value.code == "limits_unavailable"
        assert int(refusal.value.headers()["Retry-After"]) >= 1
    assert await away.standing(who) == {}, "what takes nothing is answered all the same"
    await away.close()


async def test_headers_show_the_seats_that_are_left(limits):
    who = caller("key_1", KeyLimits(max_concurrent=2), max_concurrent=9)
    held, decision = await limits.reserve(who, "a", 1)
    headers = limit_headers(decision)
    assert headers["x-ratelimit-limit-concurrent"] == "2"
    assert headers["x-ratelimit-remaining-concurrent"] == "1"
    await limits.settle(held, tokens=1, refund_request=False)
    assert (await limits.standing(who))["x-ratelimit-remaining-concurrent"] == "2"
