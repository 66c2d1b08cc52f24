"""The audit log: kept with what it speaks of, and never changed."""

import httpx
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from app.audit import service
from app.audit.models import AuditEvent
from app.platform import Platform
from tests.factories import bearer, make_caller, make_key, make_tenant


@pytest.fixture
def database_url(any_database_url: str) -> str:
    return any_database_url


async def events(platform: Platform, **filters: str) -> list[AuditEvent]:
    async with platform.db.reading() as session:
        return await service.list_events(session, **{"tenant_id": None, **filters})


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE audit_events SET action = 'nothing'",
        "DELETE FROM audit_events",
    ],
)
async def test_nobody_changes_or_deletes_an_event(platform: Platform, statement: str) -> None:
    await make_tenant(platform)
    with pytest.raises(DBAPIError, match="append-only"):
        async with platform.db.transaction() as session:
            await session.execute(text(statement))
    assert [event.action for event in await events(platform)] == ["tenant.create"]


async def test_an_event_is_rolled_back_with_what_it_speaks_of(platform: Platform) -> None:
    async def fails() -> None:
        async with platform.db.transaction() as session:
            await service.record(
                session, actor="tests", action="thing.do", target="thing", tenant_id=None
            )
            raise RuntimeError("after the event")

    with pytest.raises(RuntimeError, match="after the event"):
        await fails()
    assert await events(platform) == []


async def test_a_refusal_is_kept_although_its_request_is_rolled_back(platform: Platform) -> None:
    tenant = await make_tenant(platform)
    caller = make_caller(platform, tenant)
    await service.record_alone(
        platform.db, actor=caller, action="authz_fail", target="adp_1", tenant_id=tenant.id
    )
    (event,) = await events(platform, action="authz_fail")
    assert (event.actor_kind, event.actor_id) == ("api_key", "key_test")
    assert event.tenant_id == tenant.id


async def test_a_tenant_reads_its_own_events_alone_newest_first(platform: Platform) -> None:
    mine, foreign = await make_tenant(platform), await make_tenant(platform)
    async with platform.db.transaction() as session:
        for n in range(3):
            await service.record(
                session, actor="tests", action=f"n.{n}", target="x", tenant_id=mine.id
            )
    found = await events(platform, tenant_id=mine.id)
    assert {event.tenant_id for event in found} == {mine.id}
    assert foreign.id not in {event.target for event in found}
    assert [event.id for event in found] == sorted((e.id for e in found), reverse=True)


async def test_a_tenant_reads_its_own_events_over_the_api(
    client: httpx.AsyncClient, platform: Platform
) -> None:
    own, other = await make_tenant(platform), await make_tenant(platform)
    key = await make_key(platform, own, access="read", name="auditor")
    await make_key(platform, other)
    told = await client.get("/v1/audit", headers=bearer(key))
    assert [event["action"] for event in told.json()["data"]] == ["key.create", "tenant.create"]
    assert {event["tenant_id"] for event in told.json()["data"]} == {own.id}
    one = await client.get("/v1/audit", params={"target": key.row.id}, headers=bearer(key))
    assert one.json()["data"][0]["detail"]["name"] == "auditor"
