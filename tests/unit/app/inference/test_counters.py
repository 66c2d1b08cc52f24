"""What a call changes: the counters per minute, the month, the ledger. Streams are no exception."""

import asyncio

import pytest

from app import errors
from app.usage import repository
from tests.factories import bearer, make_key, make_tenant
from tests.fake_engine import BASE_NAME

HELLO = {
    "model": BASE_NAME,
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 50,
}


async def used(api, headers) -> dict[str, int]:
    limits = (await api.get("/v1/limits", headers=headers)).json()
    windows = {window["name"]: window["used"] for window in limits["per_minute"]}
    month = next(m for m in limits["monthly_tokens"] if m["scope"] == "tenant")
    return windows | {
        "month": month["used"],
        "reserved": month["reserved"],
        "running": limits["concurrent"],
    }


async def settled(platform) -> None:
    """Every answer's row is closed and its reservation settled."""
    for _ in range(400):
        if not platform.ledger.running:
            break
        await asyncio.sleep(0.005)
    await platform.ledger.drain()
    await asyncio.sleep(0.01)


@pytest.mark.parametrize("ends", ["whole", "length", "fails"])
async def test_a_stream_changes_the_counters_as_a_whole_answer_does(api, engine, platform, ends):
    changes = []
    if ends == "fails":
        engine.fail_at = (4, "engine_step_failed")
    for streamed in (False, True):
        tenant = await make_tenant(platform, monthly_tokens=10_000)
        headers = bearer(await make_key(platform, tenant))
        body = {**HELLO, "stream": streamed, "max_tokens": 3 if ends == "length" else 50}
        answer = await api.post("/v1/chat/completions", json=body, headers=headers)
        await settled(platform)
        counted = await used(api, headers)
        async with platform.db.reading() as session:
            row = await repository.get(session, answer.headers["x-request-id"])
        billed = row.prompt_tokens + row.completion_tokens
        assert counted["tokens"] == counted["month"] == billed > 0
        assert (counted["reserved"], counted["running"]) == (0, 0)
        changes.append((counted, row.prompt_tokens, row.completion_tokens))
    assert changes[0] == changes[1]


async def test_every_limit_is_in_the_headers_and_in_v1_limits(api, platform):
    tenant = await make_tenant(
        platform,
        "limited",
        requests_per_minute=10,
        tokens_per_minute=1000,
        max_concurrent=3,
        monthly_tokens=5000,
    )
    headers = bearer(await make_key(platform, tenant))
    answer = await api.post("/v1/chat/completions", json=HELLO, headers=headers)
    shown = {
        k.removeprefix("x-ratelimit-"): v for k, v in answer.headers.items() if "ratelimit" in k
    }
    reserved = len("user:hi\n") + 50
    assert shown["limit-requests"] == "10"
    assert shown["remaining-tokens"] == str(1000 - reserved)
    assert (shown["limit-concurrent"], shown["remaining-concurrent"]) == ("3", "2")
    assert shown["limit-monthly-tokens"] == "5000"
    assert shown["remaining-monthly-tokens"] == str(5000 - reserved)
    assert shown["reset-monthly-tokens"] == f"{17 * 86_400 + 12 * 3600}s"
    limits = (await api.get("/v1/limits", headers=headers)).json()
    assert {w["name"]: w["limit"] for w in limits["per_minute"]} == {"requests": 10, "tokens": 1000}
    assert limits["concurrency"] == [{"scope": "tenant", "limit": 3, "used": 0}]
    assert limits["monthly_tokens"][0]["resets_at"] == "2026-04-01T00:00:00Z"


async def test_a_refusal_for_the_month_tells_where_the_minute_stands(api, platform):
    tenant = await make_tenant(platform, monthly_tokens=10)
    headers = bearer(await make_key(platform, tenant))
    refused = await api.post("/v1/chat/completions", json=HELLO, headers=headers)
    assert refused.status_code == 429
    assert refused.headers["x-ratelimit-remaining-requests"] == "599"
    assert (await used(api, headers))["requests"] == 0, "the refused call gave its request back"


def retryable() -> list[type[errors.AppError]]:
    """Every class of refusal that tells the caller to come back."""
    found, waiting = [], [errors.AppError]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind.retryable:
            found.append(kind)
    return found


@pytest.mark.parametrize("wait_ms", [None, 0, 1, 999, 1001, 86_400_000])
def test_whatever_may_be_retried_says_after_how_many_whole_seconds(wait_ms):
    assert {kind.status for kind in retryable()} >= {429, 503}
    for kind in retryable():
        headers = kind("x", retry_after_ms=wait_ms).headers()
        assert int(headers["Retry-After"]) >= 1
        assert int(headers["Retry-After"]) * 1000 >= (wait_ms or 0)
        assert "x-should-retry" not in headers
