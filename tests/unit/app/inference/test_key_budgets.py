"""A key's latency budget: looser than its tenant's, and in force for every call of it."""

from typing import Any

import httpx
import pytest

from app.caller import KeyBudget
from app.platform import Platform
from app.tenants.service import update_tenant
from engine.types import LatencyBudget
from tests.factories import bearer, make_key, make_tenant
from tests.fake_engine import BASE_NAME, FakeEngine

LOOSE = KeyBudget(ttft_ms=2000.0, tpot_ms=80.0, budget_percentile=0.8)
CALL = {"model": BASE_NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
SHOWN = ("ttft_ms", "tpot_ms", "budget_percentile")


async def quick_tenant(platform: Platform) -> Any:
    return await make_tenant(platform, ttft_ms=500.0, tpot_ms=40.0, budget_percentile=0.9)


def code(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


async def test_calls_of_the_key_run_under_its_budget_and_limits_shows_it(
    api: httpx.AsyncClient, engine: FakeEngine, platform: Platform
) -> None:
    tenant = await quick_tenant(platform)
    loose, plain = await make_key(platform, tenant, budget=LOOSE), await make_key(platform, tenant)
    for key, budget in ((loose, (2000.0, 80.0, 0.8)), (plain, (500.0, 40.0, 0.9))):
        answer = await api.post("/v1/chat/completions", json=CALL, headers=bearer(key))
        assert answer.status_code == 200
        assert engine.requests[-1].budget == LatencyBudget(*budget)
        limits = (await api.get("/v1/limits", headers=bearer(key))).json()
        assert tuple(limits[name] for name in SHOWN) == budget


async def test_a_call_may_loosen_the_keys_budget_further_and_not_return_to_the_tenants(
    api: httpx.AsyncClient, engine: FakeEngine, platform: Platform
) -> None:
    headers = bearer(await make_key(platform, await quick_tenant(platform), budget=LOOSE))
    looser = {**CALL, "loramux": {"ttft_ms": 3000}}
    assert (await api.post("/v1/chat/completions", json=looser, headers=headers)).status_code == 200
    assert engine.requests[-1].budget.ttft_ms == 3000
    tighter = {**CALL, "loramux": {"ttft_ms": 600}}
    answer = await api.post("/v1/chat/completions", json=tighter, headers=headers)
    assert code(answer) == (400, "budget_tightened", "loramux.ttft_ms")


async def test_what_the_tenant_is_promised_later_is_what_the_key_loosens(
    client: httpx.AsyncClient, platform: Platform
) -> None:
    tenant = await quick_tenant(platform)
    headers = bearer(await make_key(platform, tenant, budget=LOOSE))
    changes = {"ttft_ms": 9000.0, "tpot_ms": None, "budget_percentile": 0.7}
    async with platform.db.transaction() as session:
        await update_tenant(
            session, tenant.id, changes=changes, now=platform.clock.now(), actor="tests"
        )
    platform.forget_keys()
    limits = (await client.get("/v1/limits", headers=headers)).json()
    assert tuple(limits[name] for name in SHOWN) == (9000.0, None, 0.7)


@pytest.mark.parametrize(
    ("field", "value"),
    [("ttft_ms", 499.0), ("tpot_ms", 39.9), ("budget_percentile", 0.91)],
)
async def test_tighter_than_the_tenants_is_refused_for_a_new_key_and_for_a_changed_one(
    client: httpx.AsyncClient, platform: Platform, field: str, value: float
) -> None:
    tenant = await quick_tenant(platform)
    operator = bearer(await make_key(platform, None))
    body = {"tenant_id": tenant.id, field: value}
    refused = (400, "budget_tightened", field)
    assert code(await client.post("/admin/v1/keys", json=body, headers=operator)) == refused
    path = f"/admin/v1/keys/{(await make_key(platform, tenant)).row.id}"
    assert code(await client.patch(path, json={field: value}, headers=operator)) == refused


async def test_without_a_tenants_budget_there_is_none_to_loosen(
    client: httpx.AsyncClient, platform: Platform
) -> None:
    tenant = await make_tenant(platform)
    body = {"tenant_id": tenant.id, "ttft_ms": 5000}
    answer = await client.post(
        "/admin/v1/keys", json=body, headers=bearer(await make_key(platform, None))
    )
    assert code(answer) == (400, "budget_tightened", "ttft_ms")


async def test_an_operators_key_has_none(client: httpx.AsyncClient, platform: Platform) -> None:
    body = {"operator": True, "ttft_ms": 5000}
    answer = await client.post(
        "/admin/v1/keys", json=body, headers=bearer(await make_key(platform, None))
    )
    assert answer.status_code == 400


async def test_it_is_changed_shown_kept_by_a_rotation_and_ended_with_null(
    client: httpx.AsyncClient, platform: Platform
) -> None:
    operator = bearer(await make_key(platform, None))
    key = await make_key(platform, await quick_tenant(platform))
    path = f"/admin/v1/keys/{key.row.id}"
    body = {"ttft_ms": 900.5, "budget_percentile": 0.6}
    changed = (await client.patch(path, json=body, headers=operator)).json()
    assert tuple(changed[name] for name in SHOWN) == (900.5, None, 0.6)
    ended = (await client.patch(path, json={"ttft_ms": None}, headers=operator)).json()
    assert tuple(ended[name] for name in SHOWN) == (None, None, 0.6)
    rotated = (await client.post(f"{path}/rotate", json={}, headers=operator)).json()
    assert rotated["api_key"]["budget_percentile"] == 0.6


async def test_a_managing_key_hands_on_no_better_promise_than_its_own(
    client: httpx.AsyncClient, platform: Platform
) -> None:
    tenant = await quick_tenant(platform)
    headers = bearer(await make_key(platform, tenant, access="manage", budget=LOOSE))
    made = (await client.post("/v1/keys", json={}, headers=headers)).json()["api_key"]
    assert tuple(made[name] for name in SHOWN) == (2000.0, 80.0, 0.8)
    for field, better in (("ttft_ms", 600.0), ("budget_percentile", 0.85)):
        answer = await client.post("/v1/keys", json={field: better}, headers=headers)
        assert code(answer) == (403, "beyond_own_key", field)
    answer = await client.patch(f"/v1/keys/{made['id']}", json={"tpot_ms": None}, headers=headers)
    assert code(answer) == (403, "beyond_own_key", "tpot_ms")
    worse = await client.post("/v1/keys", json={"ttft_ms": 2500.0}, headers=headers)
    assert worse.status_code == 201
