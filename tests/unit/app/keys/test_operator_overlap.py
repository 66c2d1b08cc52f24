"""An operator's key in the overlap of its rotation hands on nothing that would outlive it."""

from datetime import timedelta
from typing import Any

import httpx
import pytest

from app.clock import FrozenClock
from app.platform import Platform
from tests.factories import bearer, make_key, make_tenant, make_user, sign_in

OVERLAP_S = 60
BEYOND = (403, "beyond_own_key", "expires_at")


@pytest.fixture
async def overlapping(client: httpx.AsyncClient, platform: Platform) -> httpx.AsyncClient:
    """A client whose operator's key was just rotated, and works for OVERLAP_S more."""
    own = await make_key(platform, None)
    client.headers.update(bearer(own))
    path = f"/admin/v1/keys/{own.row.id}/rotate"
    assert (await client.post(path, json={"overlap_s": OVERLAP_S})).status_code == 201
    return client


def in_seconds(clock: FrozenClock, seconds: int) -> str:
    return (clock.now() + timedelta(seconds=seconds)).isoformat()


def refusal(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


@pytest.mark.parametrize("whose", ["tenant", "operator"])
async def test_it_makes_no_key_that_outlives_it(
    overlapping: httpx.AsyncClient, platform: Platform, clock: FrozenClock, whose: str
) -> None:
    body: dict[str, Any] = {"operator": True}
    if whose == "tenant":
        body = {"tenant_id": (await make_tenant(platform)).id}
    for ends in (None, in_seconds(clock, OVERLAP_S + 1)):
        made = await overlapping.post("/admin/v1/keys", json={**body, "expires_at": ends})
        assert refusal(made) == BEYOND
    assert refusal(await overlapping.post("/admin/v1/keys", json=body)) == BEYOND
    within = {**body, "expires_at": in_seconds(clock, OVERLAP_S)}
    made = await overlapping.post("/admin/v1/keys", json=within)
    assert made.status_code == 201
    path = f"/admin/v1/keys/{made.json()['id']}"
    assert refusal(await overlapping.patch(path, json={"expires_at": None})) == BEYOND


async def test_it_neither_widens_nor_rotates_one_that_outlives_it_but_revokes_it(
    overlapping: httpx.AsyncClient, platform: Platform
) -> None:
    key = await make_key(platform, await make_tenant(platform))
    path = f"/admin/v1/keys/{key.row.id}"
    assert refusal(await overlapping.patch(path, json={"access": "manage"})) == BEYOND
    assert refusal(await overlapping.post(f"{path}/rotate")) == BEYOND
    assert (await overlapping.patch(path, json={"name": "old"})).json()["name"] == "old"
    assert (await overlapping.post(f"{path}/revoke")).json()["state"] == "revoked"


async def test_it_lets_nobody_in_and_may_put_them_out(
    overlapping: httpx.AsyncClient, platform: Platform
) -> None:
    user = await make_user(platform, await make_tenant(platform))
    path = f"/admin/v1/users/{user.id}"
    person = {"email": "new@example.com", "role": "operator"}
    answers = [
        await overlapping.post("/admin/v1/users", json=person),
        await overlapping.post(f"{path}/reset"),
        await overlapping.patch(path, json={"role": "tenant_admin"}),
        await overlapping.post(f"{path}/resume"),
    ]
    assert [refusal(answer) for answer in answers] == [(403, "bound_key", None)] * len(answers)
    assert (await overlapping.post(f"{path}/suspend")).json()["status"] == "suspended"


async def test_its_successor_and_a_session_are_bound_by_nothing(
    client: httpx.AsyncClient, platform: Platform
) -> None:
    own = await make_key(platform, None)
    rotate = f"/admin/v1/keys/{own.row.id}/rotate"
    successor = (await client.post(rotate, headers=bearer(own))).json()["key"]
    body = {"operator": True}
    headers = {"authorization": f"Bearer {successor}"}
    assert (await client.post("/admin/v1/keys", json=body, headers=headers)).status_code == 201
    client.cookies.update(await sign_in(platform, await make_user(platform)))
    assert (await client.post("/admin/v1/keys", json=body)).status_code == 201


async def test_a_key_that_merely_expires_still_makes_keys_for_others(
    client: httpx.AsyncClient, platform: Platform, clock: FrozenClock
) -> None:
    own = await make_key(platform, None, expires_at=clock.now() + timedelta(days=1))
    body = {"tenant_id": (await make_tenant(platform)).id}
    made = await client.post("/admin/v1/keys", json=body, headers=bearer(own))
    assert made.json()["api_key"]["expires_at"] is None
