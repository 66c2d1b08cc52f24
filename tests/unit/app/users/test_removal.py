"""Signing a user out everywhere, and removing one."""

import httpx
import pytest

from app.errors import NotFound
from app.platform import Platform
from app.users import service, sessions
from tests.factories import bearer, make_key, make_tenant, make_user, sign_in


@pytest.fixture
def database_url(any_database_url: str) -> str:
    return any_database_url


@pytest.fixture
async def operator(client: httpx.AsyncClient, platform: Platform) -> dict[str, str]:
    return bearer(await make_key(platform, None))


async def signed_in(client: httpx.AsyncClient, cookies: dict[str, str]) -> bool:
    client.cookies.clear()
    client.cookies.update(cookies)
    page = await client.get("/console/keys")
    client.cookies.clear()
    return page.status_code == 200


async def test_sign_out_ends_every_session_and_lets_them_in_again(
    client: httpx.AsyncClient, platform: Platform, operator: dict[str, str]
) -> None:
    user = await make_user(platform, await make_tenant(platform))
    held = [await sign_in(platform, user) for _ in range(2)]
    path = f"/admin/v1/users/{user.id}"
    listed = await client.get(f"{path}/sessions", headers=operator)
    assert [entry["address"] for entry in listed.json()["data"]] == ["127.0.0.1"] * 2
    for cookies in held:
        assert next(iter(cookies.values())) not in listed.text
    assert (await client.post(f"{path}/sign-out", headers=operator)).json()["sessions"] == 2
    assert [await signed_in(client, cookies) for cookies in held] == [False, False]
    assert await signed_in(client, await sign_in(platform, user))


async def test_a_removed_user_is_gone_with_sessions_and_the_email_is_free(
    client: httpx.AsyncClient, platform: Platform, operator: dict[str, str]
) -> None:
    tenant = await make_tenant(platform)
    user = await make_user(platform, tenant, email="ada@example.com")
    cookies = await sign_in(platform, user)
    assert (await client.post(f"/admin/v1/users/{user.id}/reset", headers=operator)).is_success
    gone = await client.delete(f"/admin/v1/users/{user.id}", headers=operator)
    assert gone.json() == {"id": user.id, "object": "user.removed"}
    assert not await signed_in(client, cookies)
    assert (await client.get(f"/admin/v1/users/{user.id}", headers=operator)).status_code == 404
    again = await make_user(platform, tenant, email="ada@example.com")
    assert again.id != user.id
    log = await client.get(
        "/admin/v1/audit", params={"target": user.id, "limit": 200}, headers=operator
    )
    assert {"user.create", "user.remove"} <= {e["action"] for e in log.json()["data"]}


async def test_the_last_operator_stays(
    client: httpx.AsyncClient, platform: Platform, operator: dict[str, str]
) -> None:
    first = await make_user(platform)
    path = f"/admin/v1/users/{first.id}"
    answer = await client.delete(path, headers=operator)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "last_operator")
    await make_user(platform)
    assert (await client.delete(path, headers=operator)).status_code == 200


async def test_another_tenants_user_cannot_be_told_from_none(platform: Platform) -> None:
    mine, foreign = await make_tenant(platform), await make_tenant(platform)
    theirs = await make_user(platform, foreign)
    told = []
    for user_id in (theirs.id, "usr_none"):
        for act in (service.remove_user, sessions.end_sessions):
            with pytest.raises(NotFound) as caught:
                async with platform.db.transaction() as session:
                    await act(
                        session,
                        user_id,
                        tenant_id=mine.id,
                        now=platform.clock.now(),
                        actor="tests",
                    )
            told.append(caught.value.message.replace(user_id, "?"))
    assert len(set(told)) == 1
