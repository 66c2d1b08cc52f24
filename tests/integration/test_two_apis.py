"""Two api processes, one Redis, many callers at once: no limit is passed, whatever Redis does."""

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest
from sqlalchemy import create_engine, text

from app.platform import open_platform
from tests.factories import make_key, make_tenant
from tests.stack import Stack

pytestmark = [
    pytest.mark.wide,
    pytest.mark.redis,
    pytest.mark.timeout(240),
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server here"),
]
CALLERS = 200
MAX_TOKENS = 8


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """No lease ends while the test looks; every caller has a connection of its own."""
    opened = Stack(tmp_path_factory.mktemp("two"), apis=2, step_ms=3.0)
    try:
        opened.start()
        yield opened
    finally:
        opened.stop()


async def a_key(stack: Stack, name: str, **limits: int) -> tuple[str, str]:
    """A tenant with these limits: (its id, the text of a key of it)."""
    platform = open_platform(stack.settings)
    try:
        tenant = await make_tenant(platform, name, max_concurrent=1000, **limits)
        return tenant.id, (await make_key(platform, tenant)).secret.text
    finally:
        await platform.close()


def body(streamed: bool) -> dict[str, object]:
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": MAX_TOKENS,
        "stream": streamed,
    }


async def call(client: httpx.AsyncClient, url: str, key: str, streamed: bool) -> tuple[int, str]:
    """(status, code of the refusal or "")."""
    try:
        answer = await client.post(
            f"{url}/v1/chat/completions",
            json=body(streamed),
            headers={"authorization": f"Bearer {key}"},
        )
    except httpx.HTTPError as error:
        return 0, type(error).__name__
    if answer.status_code in (429, 503):
        assert int(answer.headers["retry-after"]) >= 1
    code = "" if answer.status_code == 200 else answer.json()["error"]["code"]
    return answer.status_code, code


def ledger(stack: Stack, tenant_id: str) -> tuple[int, int, int]:
    """(closed rows that cost something, their tokens, rows still open)."""
    engine = create_engine(stack.settings.database_url.replace("+aiosqlite", ""))
    query = (
        "SELECT sum(prompt_tokens > 0), sum(prompt_tokens + completion_tokens), "
        "sum(status = 'open') FROM usage_records WHERE tenant_id = :tenant"
    )
    try:
        with engine.connect() as connection:
            rows, tokens, running = connection.execute(text(query), {"tenant": tenant_id}).one()
    finally:
        engine.dispose()
    return int(rows or 0), int(tokens or 0), int(running or 0)


async def standing(client: httpx.AsyncClient, url: str, key: str) -> dict[str, int]:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        answer = await client.get(f"{url}/v1/limits", headers={"authorization": f"Bearer {key}"})
        if answer.status_code == 200:
            return {window["name"]: window["used"] for window in answer.json()["per_minute"]}
        await asyncio.sleep(int(answer.headers["retry-after"]))
    raise AssertionError("the limits did not come back")


async def drained(stack: Stack, tenant_id: str) -> None:
    for _ in range(200):
        if ledger(stack, tenant_id)[2] == 0:
            await asyncio.sleep(0.3)  # the settlement follows the row
            return
        await asyncio.sleep(0.1)
    raise AssertionError("rows stay open")


def one_reservation(stack: Stack, tenant_id: str) -> int:
    engine = create_engine(stack.settings.database_url.replace("+aiosqlite", ""))
    query = "SELECT max(reserved_tokens) FROM usage_records WHERE tenant_id = :tenant"
    try:
        with engine.connect() as connection:
            return int(connection.execute(text(query), {"tenant": tenant_id}).scalar() or 0)
    finally:
        engine.dispose()


@pytest.mark.parametrize("redis_dies", [False, True])
async def test_two_hundred_callers_are_admitted_up_to_the_limit_and_the_counter_is_the_ledger(
    stack: Stack, redis_dies: bool
) -> None:
    limit = 1000
    tenant_id, key = await a_key(stack, f"crowd-{int(redis_dies)}", tokens_per_minute=limit)
    limits = httpx.Limits(max_connections=CALLERS)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        began = time.monotonic()
        calls = [
            asyncio.create_task(call(client, stack.urls[n % 2], key, streamed=n % 3 == 0))
            for n in range(CALLERS)
        ]
        if redis_dies:
            await asyncio.sleep(0.4)
            stack.kill("redis")
            await asyncio.sleep(1.0)
            stack.start_process("redis")
        answers = await asyncio.gather(*calls)
        if redis_dies:  # those that were refused come again, as they were told to
            await asyncio.sleep(6)
            answers += await asyncio.gather(
                *(call(client, stack.urls[n % 2], key, streamed=True) for n in range(CALLERS))
            )
        await drained(stack, tenant_id)
        rows, tokens, _ = ledger(stack, tenant_id)
        counted = [await standing(client, url, key) for url in stack.urls]
        assert time.monotonic() - began < 60, "within one window, or the test shows nothing"
    statuses = {status for status, _ in answers}
    assert statuses <= {200, 429, 503}, answers
    assert sum(status == 200 for status, _ in answers) == rows > 0
    assert 429 in statuses
    assert tokens <= limit + one_reservation(stack, tenant_id)
    assert tokens > limit / 2, "the limit was used"
    assert counted[0] == counted[1]
    assert counted[0]["tokens"] == tokens
    assert counted[0]["requests"] == rows


async def test_running_calls_never_outnumber_the_seats(stack: Stack) -> None:
    platform = open_platform(stack.settings)
    try:
        tenant = await make_tenant(platform, "seats", max_concurrent=10)
        key = (await make_key(platform, tenant)).secret.text
    finally:
        await platform.close()
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=60)) as client:
        answers = await asyncio.gather(
            *(call(client, stack.urls[n % 2], key, streamed=True) for n in range(60))
        )
        served = sum(status == 200 for status, _ in answers)
        refused = [code for status, code in answers if status == 429]
        assert served + len(refused) == 60, Counter(answers)
        assert set(refused) <= {"concurrency_limit_exceeded"}
        assert served >= 10
        again = await call(client, stack.urls[0], key, streamed=False)
        assert again[0] == 200, "every seat is free again"
