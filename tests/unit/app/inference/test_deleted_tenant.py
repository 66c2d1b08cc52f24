"""Calls that run while their tenant is deleted: cut off with a reason, and in the ledger."""

import asyncio
import json

from app.adapters.deps import open_resources
from app.tenants import deletion
from app.usage import repository
from tests.factories import bearer, make_key
from tests.unit.app.inference.test_streaming import HELLO, until


async def begin(platform, tenant):
    """What another api process would have committed."""
    async with platform.db.transaction() as session:
        await deletion.begin(
            session, tenant.id, confirm=tenant.name, now=platform.clock.now(), actor="tests"
        )


async def test_a_stream_ends_with_the_reason_and_its_row_is_closed(api, engine, platform, tenant):
    operator = bearer(await make_key(platform, None))
    engine.hold()
    engine.let(3)
    async with api.stream("POST", "/v1/chat/completions", json=HELLO) as response:
        lines = response.aiter_lines()
        first = await anext(lines)
        assert '"role"' in first
        deleted = await api.delete(
            f"/admin/v1/tenants/{tenant.id}", params={"confirm": "acme"}, headers=operator
        )
        assert deleted.status_code == 202
        frames = [line[6:] async for line in lines if line.startswith("data: ")]
    assert frames[-1] == "[DONE]"
    assert json.loads(frames[-2])["error"]["code"] == "tenant_deleted"
    assert engine.running == 0
    await platform.ledger.drain()
    async with platform.db.reading() as session:
        row = await repository.get(session, response.headers["x-request-id"])
    assert (row.status, row.error_code) == ("cancelled", "tenant_deleted")
    assert row.completion_tokens <= 3
    assert platform.running.tenants() == set()


async def test_a_whole_answer_is_refused_when_another_process_deleted_the_tenant(
    api, engine, platform, tenant
):
    engine.hold()
    call = asyncio.create_task(
        api.post("/v1/chat/completions", json={**HELLO, "stream": False, "stream_options": None})
    )
    await until(lambda: engine.running == 1)
    assert await deletion.end_calls_of_deleted(platform) == 0
    await begin(platform, tenant)
    assert await deletion.end_calls_of_deleted(platform) == 1
    answer = await call
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "tenant_deleted")
    assert engine.running == 0


async def test_the_deletion_is_not_complete_while_a_call_runs(api, engine, platform, tenant):
    resources = open_resources(platform)  # a worker's sweep, which knows no calls but the ledger's
    body = {**HELLO, "stream": False, "stream_options": None}
    engine.hold()
    call = asyncio.create_task(api.post("/v1/chat/completions", json=body))
    await until(lambda: engine.running == 1)
    await begin(platform, tenant)
    platform.clock.advance(seconds=60)
    receipt = await deletion.carry_on(resources, tenant.id)
    assert (receipt.complete, receipt.calls_running) == (False, 1)
    await deletion.end_calls_of_deleted(platform)
    await call
    await platform.ledger.drain()
    receipt = await deletion.carry_on(resources, tenant.id)
    assert (receipt.complete, receipt.calls_running) == (True, 0)
