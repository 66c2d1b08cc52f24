"""PATCH of a key: its restrictions change, its secret stays."""

from typing import Any

import httpx
import pytest

from app.caller import KeyLimits
from app.platform import Platform
from app.tenants.service import update_tenant
from tests.factories import bearer, make_key, make_tenant


@pytest.fixture
async def operator(client: httpx.AsyncClient, platform: Platform) -> dict[str, str]:
    return bearer(await make_key(platform, None))


async def change(
    client: httpx.AsyncClient, operator: dict[str, str], key_id: str, **body: Any
) -> httpx.Response:
    return await client.patch(f"/admin/v1/keys/{key_id}", json=body, headers=operator)


async def test_only_what_is_sent_changes_and_applies_at_once(
    client: httpx.AsyncClient, platform: Platform, operator: dict[str, str]
) -> None:
    tenant = await make_tenant(platform)
    key = await make_key(
        platform,
        tenant,
        name="ci",
        adapters=["support"],
        networks=["203.0.113.0/24"],
        limits=KeyLimits(requests_per_minute=5),
    )
    assert (await client.get("/v1/models", headers=bearer(key))).status_code == 403
    shown = (await change(client, operator, key.row.id, networks=None, access="read")).json()
    assert (shown["networks"], shown["access"]) == (None, "read")
    assert (shown["name"], shown["adapters"]) == ("ci", ["support"])
    assert shown["requests_per_minute"] == 5
    assert (await client.get("/v1/models", headers=bearer(key))).status_code == 200
    refused = await client.delete("/v1/adapters/support", headers=bearer(key))
    assert refused.json()["error"]["code"] == "read_only_key"


async def test_a_restriction_ends_with_null(
    client: httpx.AsyncClient, platform: Platform, operator: dict[str, str]
) -> None:
    key = await make_key(
        platform,
        await make_tenant(platform),
        adapters=["support"],
        limits=KeyLimits(max_concurrent=1),
    )
    shown = (await change(client, operator, key.row.id, adapters=None, max_concurrent=None)).json()
    assert (shown["adapters"], shown["max_concurrent"]) == (None, None)


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("adapters", ["nothing"], "unknown_adapter"),
        ("networks", ["0.0.0.0/0"], "invalid_request"),
        ("requests_per_minute", 601, "limit_above_tenant"),
        ("expires_at", "2020-01-01T00:00:00Z", "invalid_request"),
        ("tenant_id", "ten_other", "unknown_field"),
        ("secret_hash", "0", "unknown_field"),
    ],
)
async def test_what_a_new_key_could_not_be_a_changed_one_cannot_either(
    client: httpx.AsyncClient,
    platform: Platform,
    operator: dict[str, str],
    field: str,
    value: Any,
    code: str,
) -> None:
    key = await make_key(platform, await make_tenant(platform))
    answer = await change(client, operator, key.row.id, **{field: value})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, field)


async def test_a_key_above_a_limit_that_was_lowered_can_still_be_renamed(
    client: httpx.AsyncClient, platform: Platform, operator: dict[str, str]
) -> None:
    tenant = await make_tenant(platform, requests_per_minute=10)
    key = await make_key(platform, tenant, limits=KeyLimits(requests_per_minute=10))
    async with platform.db.transaction() as session:
        await update_tenant(
            session,
            tenant.id,
            changes={"requests_per_minute": 5},
            now=platform.clock.now(),
            actor="tests",
        )
    assert (await change(client, operator, key.row.id, name="ci")).json()["name"] == "ci"


async def test_a_key_whose_adapter_was_deleted_keeps_its_scope_when_something_else_changes(
    client: httpx.AsyncClient, platform: Platform, operator: dict[str, str]
) -> None:
    tenant = await make_tenant(platform)
    key = await make_key(platform, tenant, adapters=["support"])
    whole = bearer(await make_key(platform, tenant))
    assert (await client.delete("/v1/adapters/support", headers=whole)).status_code == 200
    shown = (await change(client, operator, key.row.id, access="read")).json()
    assert (shown["adapters"], shown["access"]) == (["support"], "read")


async def test_a_key_that_does_not_work_is_not_changed(
    client: httpx.AsyncClient, platform: Platform, operator: dict[str, str]
) -> None:
    key = await make_key(platform, await make_tenant(platform))
    await client.post(f"/admin/v1/keys/{key.row.id}/revoke", headers=operator)
    answer = await change(client, operator, key.row.id, name="ci")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "key_not_active")


async def test_the_audit_log_says_from_what_to_what(
    client: httpx.AsyncClient, platform: Platform, operator: dict[str, str]
) -> None:
    key = await make_key(platform, await make_tenant(platform), name="a")
    await change(client, operator, key.row.id, name="b", access="read", max_concurrent=None)
    log = await client.get("/admin/v1/audit", params={"action": "key.update"}, headers=operator)
    (event,) = log.json()["data"]
    assert event["detail"]["name"] == {"from": "a", "to": "b"}
    assert event["detail"]["access"] == {"from": "full", "to": "read"}
    assert "max_concurrent" not in event["detail"]
