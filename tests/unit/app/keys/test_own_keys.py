"""/v1/keys: a tenant manages its own keys, and no key hands out more than it has."""

from datetime import datetime, timedelta
from typing import Any

import httpx
import pytest

from app.audit import service as audit
from app.caller import KeyLimits
from app.clock import FrozenClock
from app.keys.service import NewKey
from app.platform import Platform
from tests.factories import bearer, make_key, make_tenant


async def managing(platform: Platform, **restrictions: Any) -> NewKey:
    tenant = await make_tenant(platform, requests_per_minute=100)
    return await make_key(platform, tenant, access="manage", **restrictions)


def code(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


async def test_a_key_is_made_listed_changed_rotated_and_revoked(
    client: httpx.AsyncClient, platform: Platform, clock: FrozenClock
) -> None:
    own = await managing(platform)
    headers = bearer(own)
    body = {"name": "ci", "access": "inference", "requests_per_minute": 5}
    made = await client.post("/v1/keys", json=body, headers=headers)
    assert made.status_code == 201
    path = f"/v1/keys/{made.json()['id']}"
    first = {"authorization": f"Bearer {made.json()['key']}"}
    assert (await client.get("/v1/models", headers=first)).status_code == 200
    listed = (await client.get("/v1/keys", headers=headers)).json()["data"]
    assert [entry["name"] for entry in listed] == ["ci", ""]
    assert "key" not in listed[0]
    changed = await client.patch(path, json={"max_concurrent": 2}, headers=headers)
    assert changed.json()["max_concurrent"] == 2
    rotated = await client.post(f"{path}/rotate", json={"overlap_s": 60}, headers=headers)
    second = {"authorization": f"Bearer {rotated.json()['key']}"}
    assert rotated.json()["api_key"]["requests_per_minute"] == 5
    for working in (first, second):
        assert (await client.get("/v1/models", headers=working)).status_code == 200
    clock.advance(seconds=60)
    assert code(await client.get("/v1/models", headers=first))[1] == "revoked_api_key"
    successor = f"/v1/keys/{rotated.json()['id']}"
    assert (await client.post(f"{successor}/revoke", headers=headers)).json()["state"] == "revoked"
    assert code(await client.get("/v1/models", headers=second))[1] == "revoked_api_key"
    async with platform.db.reading() as session:
        events = await audit.list_events(session, tenant_id=own.row.tenant_id)
    mine = [event.action for event in events if event.actor_id == own.row.id]
    assert mine == ["key.revoke", "key.rotate", "key.update", "key.create"]


async def test_creating_twice_with_one_idempotency_key_makes_one(
    client: httpx.AsyncClient, platform: Platform
) -> None:
    headers = bearer(await managing(platform)) | {"Idempotency-Key": "once"}
    answers = [await client.post("/v1/keys", json={}, headers=headers) for _ in range(2)]
    assert answers[0].json() == answers[1].json()


@pytest.mark.parametrize("at", ["9999-12-31T23:59:59-14:00", "0001-01-01T00:00:00+14:00"])
async def test_an_expiry_that_utc_cannot_tell_is_refused_by_its_name(
    client: httpx.AsyncClient, platform: Platform, at: str
) -> None:
    own = await managing(platform)
    calls = (("POST", "/v1/keys"), ("PATCH", f"/v1/keys/{own.row.id}"))
    for method, path in calls:
        answer = await client.request(method, path, json={"expires_at": at}, headers=bearer(own))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "expires_at"
        assert "1 to 9999" in answer.json()["error"]["message"]


async def test_working_keys_are_bounded_and_a_revoked_one_makes_room(
    client: httpx.AsyncClient, platform: Platform
) -> None:
    platform.settings = platform.settings.model_copy(update={"tenant_max_keys": 2})
    headers = bearer(await managing(platform))
    second = (await client.post("/v1/keys", json={}, headers=headers)).json()["id"]
    third = await client.post("/v1/keys", json={}, headers=headers)
    assert code(third) == (409, "too_many_keys", None)
    await client.post(f"/v1/keys/{second}/revoke", headers=headers)
    assert (await client.post("/v1/keys", json={}, headers=headers)).status_code == 201


class TestAKeyHandsOutNoMoreThanItHas:
    async def test_what_is_left_out_is_as_tight_as_the_key_that_asks(
        self, client: httpx.AsyncClient, platform: Platform, clock: FrozenClock
    ) -> None:
        end = clock.now() + timedelta(days=7)
        own = await managing(
            platform,
            networks=["127.0.0.0/8"],
            expires_at=end,
        )
        made = await client.post("/v1/keys", json={"access": "manage"}, headers=bearer(own))
        shown = made.json()["api_key"]
        assert shown["networks"] == ["127.0.0.0/8"]
        assert shown["expires_at"].startswith(end.date().isoformat())

    @pytest.mark.parametrize(
        ("field", "looser", "tighter"),
        [
            ("networks", ["10.0.0.0/8"], ["127.0.0.1/32"]),
            ("networks", ["::1/128"], ["127.0.0.1/32"]),
            ("expires_at", "2027-01-01T00:00:00Z", "2026-03-15T00:00:00Z"),
        ],
    )
    async def test_looser_is_refused_by_the_fields_name(
        self, client: httpx.AsyncClient, platform: Platform, field: str, looser: Any, tighter: Any
    ) -> None:
        own = await managing(
            platform,
            networks=["127.0.0.0/8"],
            expires_at=platform.clock.now() + timedelta(days=7),
        )
        headers = bearer(own)
        refused = (403, "beyond_own_key", field)
        made = await client.post("/v1/keys", json={field: tighter}, headers=headers)
        assert made.status_code == 201
        assert code(await client.post("/v1/keys", json={field: looser}, headers=headers)) == refused
        for target in (made.json()["id"], own.row.id):
            for value in (looser, None):
                change = {field: value}
                answer = await client.patch(f"/v1/keys/{target}", json=change, headers=headers)
                assert code(answer) == refused

    async def test_a_key_in_the_overlap_of_its_rotation_makes_none_that_outlives_it(
        self, client: httpx.AsyncClient, platform: Platform, clock: FrozenClock
    ) -> None:
        own = await managing(platform)
        free = await make_key(platform, await _tenant_of(platform, own))
        headers, refused = bearer(own), (403, "beyond_own_key", "expires_at")
        path = f"/v1/keys/{own.row.id}"
        rotated = await client.post(f"{path}/rotate", json={"overlap_s": 60}, headers=headers)
        ends = rotated.json()["api_key"]["created_at"]
        made = await client.post("/v1/keys", json={"access": "manage"}, headers=headers)
        given = datetime.fromisoformat(made.json()["api_key"]["expires_at"])
        assert given == datetime.fromisoformat(ends) + timedelta(seconds=60)
        later = {"expires_at": (clock.now() + timedelta(seconds=61)).isoformat()}
        assert code(await client.post("/v1/keys", json=later, headers=headers)) == refused
        other = f"/v1/keys/{free.row.id}"
        assert code(await client.post(f"{other}/rotate", headers=headers)) == refused
        for change in ({"expires_at": None}, {"access": "manage"}):
            assert code(await client.patch(other, json=change, headers=headers)) == refused
        assert code(await client.patch(path, json={"expires_at": None}, headers=headers)) == refused
        person = {"email": "new@example.com", "role": "tenant_viewer"}
        answer = await client.post("/v1/users", json=person, headers=headers)
        assert code(answer) == (403, "bound_key", None)
        clock.advance(seconds=60)
        heir = {"authorization": f"Bearer {made.json()['key']}"}
        assert code(await client.get("/v1/models", headers=heir))[1] == "expired_api_key"

    async def test_limits_are_not_multiplied_by_more_keys_nor_lifted(
        self, client: httpx.AsyncClient, platform: Platform
    ) -> None:
        own = await managing(platform, limits=KeyLimits(monthly_tokens=1000))
        headers, path = bearer(own), f"/v1/keys/{own.row.id}"
        for route in ("/v1/keys", f"{path}/rotate"):
            answer = await client.post(route, json={}, headers=headers)
            assert code(answer) == (403, "limited_key", None)
        for value in (1001, None):
            answer = await client.patch(path, json={"monthly_tokens": value}, headers=headers)
            assert code(answer) == (403, "beyond_own_key", "monthly_tokens")

    async def test_a_less_bound_key_is_neither_rotated_nor_widened(
        self, client: httpx.AsyncClient, platform: Platform
    ) -> None:
        own = await managing(platform, networks=["127.0.0.0/8"])
        tenant = await _tenant_of(platform, own)
        free = await make_key(platform, tenant)
        path, refused = f"/v1/keys/{free.row.id}", (403, "beyond_own_key", "networks")
        answer = await client.post(f"{path}/rotate", headers=bearer(own))
        assert code(answer) == refused
        for change in ({"access": "manage"}, {"adapters": None}, {"expires_at": None}):
            answer = await client.patch(path, json=change, headers=bearer(own))
            assert code(answer) == refused
        named = await client.patch(path, json={"name": "old one"}, headers=bearer(own))
        assert named.json()["name"] == "old one"
        revoked = await client.post(f"/v1/keys/{free.row.id}/revoke", headers=bearer(own))
        assert revoked.json()["state"] == "revoked"

    async def test_the_tenants_limits_hold_too(
        self, client: httpx.AsyncClient, platform: Platform
    ) -> None:
        body = {"requests_per_minute": 101}
        answer = await client.post("/v1/keys", json=body, headers=bearer(await managing(platform)))
        assert code(answer) == (400, "limit_above_tenant", "requests_per_minute")

    async def test_manage_access_is_for_the_whole_tenant(
        self, client: httpx.AsyncClient, platform: Platform
    ) -> None:
        own = await managing(platform)
        tenant = await _tenant_of(platform, own)
        scoped = await make_key(platform, tenant, adapters=["support"])
        body = {"access": "manage", "adapters": ["support"]}
        made = await client.post("/v1/keys", json=body, headers=bearer(own))
        assert code(made) == (400, "invalid_request", "adapters")
        changed = await client.patch(
            f"/v1/keys/{scoped.row.id}", json={"access": "manage"}, headers=bearer(own)
        )
        assert code(changed) == (400, "invalid_request", "adapters")


async def _tenant_of(platform: Platform, key: NewKey) -> Any:
    from app.tenants.service import find_tenant

    assert key.row.tenant_id is not None
    async with platform.db.reading() as session:
        return await find_tenant(session, key.row.tenant_id)
