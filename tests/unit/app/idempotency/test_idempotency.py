"""A creating request that is sent twice."""

import asyncio

import httpx
import pytest
from sqlalchemy import select

from app.clock import FrozenClock
from app.idempotency import service
from app.idempotency.models import KeptAnswer
from app.platform import Platform
from tests.factories import bearer, make_key, make_tenant

ONCE = {"idempotency-key": "a7c1"}


@pytest.fixture
def database_url(any_database_url: str) -> str:
    return any_database_url


@pytest.fixture
async def operator(client: httpx.AsyncClient, platform: Platform) -> httpx.AsyncClient:
    client.headers.update(bearer(await make_key(platform, None)))
    return client


async def test_creates_once_and_answers_twice_the_same(
    operator: httpx.AsyncClient, platform: Platform
) -> None:
    tenant = await make_tenant(platform)
    body = {"tenant_id": tenant.id}
    first = await operator.post("/admin/v1/keys", json=body, headers=ONCE)
    second = await operator.post("/admin/v1/keys", json=body, headers=ONCE)
    assert (first.status_code, first.json()) == (second.status_code, second.json())
    listed = await operator.get("/admin/v1/keys", params={"tenant_id": tenant.id})
    assert len(listed.json()["data"]) == 1


async def test_without_a_key_creates_twice(operator: httpx.AsyncClient, platform: Platform) -> None:
    body = {"tenant_id": (await make_tenant(platform)).id}
    first, second = [await operator.post("/admin/v1/keys", json=body) for _ in range(2)]
    assert first.json()["id"] != second.json()["id"]


async def test_at_once_creates_once(operator: httpx.AsyncClient, platform: Platform) -> None:
    answers = await asyncio.gather(
        *(operator.post("/admin/v1/tenants", json={"name": "a"}, headers=ONCE) for _ in range(4))
    )
    created = {answer.json()["id"] for answer in answers if answer.status_code == 201}
    assert len(created) == 1
    assert {answer.status_code for answer in answers} <= {201, 409}


async def test_with_another_body_is_a_mistake(operator: httpx.AsyncClient) -> None:
    await operator.post("/admin/v1/tenants", json={"name": "a"}, headers=ONCE)
    answer = await operator.post("/admin/v1/tenants", json={"name": "b"}, headers=ONCE)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "idempotency_key_reused")


async def test_of_another_caller_is_another_request(
    operator: httpx.AsyncClient, platform: Platform
) -> None:
    body = {"tenant_id": (await make_tenant(platform)).id}
    other = bearer(await make_key(platform, None))
    first = await operator.post("/admin/v1/keys", json=body, headers=ONCE)
    second = await operator.post("/admin/v1/keys", json=body, headers={**ONCE, **other})
    assert first.json()["id"] != second.json()["id"]


async def test_a_refusal_is_not_kept(operator: httpx.AsyncClient, platform: Platform) -> None:
    body = {"email": "a@b.c", "role": "tenant_admin", "tenant_id": "ten_later"}
    refused = await operator.post("/admin/v1/users", json=body, headers=ONCE)
    assert refused.status_code == 404
    body["tenant_id"] = (await make_tenant(platform)).id
    assert (await operator.post("/admin/v1/users", json=body, headers=ONCE)).status_code == 201


async def test_after_a_day_it_is_a_new_request(
    operator: httpx.AsyncClient, platform: Platform, clock: FrozenClock
) -> None:
    body = {"tenant_id": (await make_tenant(platform)).id}
    first = await operator.post("/admin/v1/keys", json=body, headers=ONCE)
    clock.advance(seconds=service.KEEP.total_seconds())
    second = await operator.post("/admin/v1/keys", json=body, headers=ONCE)
    assert first.json()["id"] != second.json()["id"]


async def test_the_kept_answer_does_not_hold_the_new_keys_text(
    operator: httpx.AsyncClient, platform: Platform
) -> None:
    body = {"tenant_id": (await make_tenant(platform)).id}
    made = await operator.post("/admin/v1/keys", json=body, headers=ONCE)
    async with platform.db.reading() as session:
        row = (await session.execute(select(KeptAnswer))).scalar_one()
    assert made.json()["key"].encode() not in row.sealed
    assert b"lmx_" not in row.sealed


async def test_the_sweep_deletes_old_answers(
    operator: httpx.AsyncClient, platform: Platform, clock: FrozenClock
) -> None:
    await operator.post("/admin/v1/tenants", json={"name": "a"}, headers=ONCE)
    clock.advance(seconds=service.KEEP.total_seconds() + 1)
    async with platform.db.transaction() as session:
        await service.sweep(session, clock.now())
    async with platform.db.reading() as session:
        assert (await session.execute(select(KeptAnswer))).all() == []


@pytest.mark.parametrize("key", ["", "x" * 256])
async def test_a_key_has_bounds(operator: httpx.AsyncClient, key: str) -> None:
    answer = await operator.post(
        "/admin/v1/tenants", json={"name": "a"}, headers={"idempotency-key": key}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Idempotency-Key")
