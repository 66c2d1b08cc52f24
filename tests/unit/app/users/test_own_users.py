"""/v1/users: a tenant decides who signs in to the console for it."""

import httpx
import pytest

from app.audit import service as audit
from app.platform import Platform
from tests.factories import bearer, make_key, make_tenant, make_user, sign_in

VIEWER = {"email": "ann@example.com", "role": "tenant_viewer"}


async def test_somebody_is_invited_made_admin_signed_out_suspended_and_removed(
    client: httpx.AsyncClient, platform: Platform
) -> None:
    tenant = await make_tenant(platform)
    key = await make_key(platform, tenant, access="manage")
    headers = bearer(key)
    made = await client.post("/v1/users", json=VIEWER, headers=headers)
    assert made.status_code == 201
    assert "/console/invitation/" in made.json()["url"]
    path = f"/v1/users/{made.json()['id']}"
    assert (await client.get(path, headers=headers)).json()["status"] == "invited"
    again = await client.post(f"{path}/reset", headers=headers)
    assert again.json()["url"] != made.json()["url"]
    admin = await client.patch(path, json={"role": "tenant_admin"}, headers=headers)
    assert admin.json()["role"] == "tenant_admin"
    assert (await client.post(f"{path}/suspend", headers=headers)).json()["status"] == "suspended"
    assert (await client.post(f"{path}/resume", headers=headers)).json()["status"] == "invited"
    assert (await client.post(f"{path}/sign-out", headers=headers)).json()["sessions"] == 0
    assert (await client.delete(path, headers=headers)).status_code == 200
    assert (await client.get("/v1/users", headers=headers)).json()["data"] == []
    async with platform.db.reading() as session:
        events = await audit.list_events(session, tenant_id=tenant.id)
    mine = [event.action for event in events if event.actor_id == key.row.id]
    assert mine == [
        "user.remove", "user.sign_out", "user.resume", "user.suspend", "user.role",
        "user.invitation", "user.create",
    ]  # fmt: skip


async def test_users_are_bounded(client: httpx.AsyncClient, platform: Platform) -> None:
    platform.settings = platform.settings.model_copy(update={"tenant_max_users": 1})
    headers = bearer(await make_key(platform, await make_tenant(platform), access="manage"))
    assert (await client.post("/v1/users", json=VIEWER, headers=headers)).status_code == 201
    another = VIEWER | {"email": "bob@example.com"}
    refused = await client.post("/v1/users", json=another, headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "too_many_users")


async def test_a_suspended_users_session_is_over_at_once(
    client: httpx.AsyncClient, platform: Platform
) -> None:
    tenant = await make_tenant(platform)
    user = await make_user(platform, tenant)
    headers = bearer(await make_key(platform, tenant, access="manage"))
    client.cookies.update(await sign_in(platform, user))
    assert (await client.get("/console/keys")).status_code == 200
    await client.post(f"/v1/users/{user.id}/suspend", headers=headers)
    assert (await client.get("/console/keys")).status_code == 303


@pytest.mark.parametrize("role", ["operator", "api_key"])
async def test_nobody_is_given_a_role_beyond_the_tenants(
    client: httpx.AsyncClient, platform: Platform, role: str
) -> None:
    headers = bearer(await make_key(platform, await make_tenant(platform), access="manage"))
    answer = await client.post("/v1/users", json=VIEWER | {"role": role}, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "role")


async def test_a_bound_key_lets_nobody_in_and_may_put_them_out(
    client: httpx.AsyncClient, platform: Platform
) -> None:
    tenant = await make_tenant(platform)
    user = await make_user(platform, tenant, role="tenant_viewer")
    key = await make_key(platform, tenant, access="manage", networks=["127.0.0.0/8"])
    headers = bearer(key)
    path = f"/v1/users/{user.id}"
    for answer in (
        await client.post("/v1/users", json=VIEWER, headers=headers),
        await client.patch(path, json={"role": "tenant_admin"}, headers=headers),
        await client.post(f"{path}/reset", headers=headers),
        await client.post(f"{path}/resume", headers=headers),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "bound_key")
        assert "networks" in answer.json()["error"]["message"]
    assert (await client.post(f"{path}/suspend", headers=headers)).status_code == 200
