"""/admin/v1: tenants, keys, users and audit, by an operator's key or console session."""

from datetime import datetime
from typing import Any

import httpx
import pytest

from app.platform import Platform
from tests.factories import bearer, make_key, make_tenant, make_user, sign_in


@pytest.fixture
async def operator(client: httpx.AsyncClient, platform: Platform) -> httpx.AsyncClient:
    """A client that authenticates with an operator's key."""
    client.headers.update(bearer(await make_key(platform, None, name="operator")))
    return client


class TestTenants:
    async def test_live_through_create_read_update_suspend_and_resume(
        self, operator: httpx.AsyncClient
    ) -> None:
        made = await operator.post(
            "/admin/v1/tenants", json={"name": "acme", "requests_per_minute": 5}
        )
        assert made.status_code == 201
        tenant = made.json()
        assert (tenant["status"], tenant["requests_per_minute"]) == ("active", 5)
        assert "salt" not in tenant
        path = f"/admin/v1/tenants/{tenant['id']}"
        changed = await operator.patch(path, json={"requests_per_minute": None, "max_rank": 16})
        assert (changed.json()["requests_per_minute"], changed.json()["max_rank"]) == (None, 16)
        assert (await operator.post(f"{path}/suspend")).json()["status"] == "suspended"
        assert (await operator.get(path)).json()["status"] == "suspended"
        assert (await operator.post(f"{path}/resume")).json()["status"] == "active"

    async def test_have_latency_budgets(self, operator: httpx.AsyncClient) -> None:
        budget = {"ttft_ms": 800.0, "tpot_ms": 60.5, "budget_percentile": 0.9, "weight": 2.0}
        made = (await operator.post("/admin/v1/tenants", json={"name": "acme", **budget})).json()
        assert {name: made[name] for name in budget} == budget
        path = f"/admin/v1/tenants/{made['id']}"
        changed = await operator.patch(path, json={"ttft_ms": None, "budget_percentile": None})
        assert (changed.json()["ttft_ms"], changed.json()["budget_percentile"]) == (None, None)
        assert changed.json()["tpot_ms"] == 60.5

    async def test_show_when_any_of_their_keys_was_last_used(
        self, operator: httpx.AsyncClient, platform: Platform
    ) -> None:
        busy, idle = await make_tenant(platform), await make_tenant(platform)
        key = await make_key(platform, busy)
        assert (await operator.get("/v1/limits", headers=bearer(key))).status_code == 200
        await platform.last_used.flush()
        now = platform.clock.now()
        listed = (await operator.get("/admin/v1/tenants")).json()["data"]
        used = {tenant["id"]: tenant["last_used_at"] for tenant in listed}
        assert datetime.fromisoformat(used[busy.id]) == now
        assert used[idle.id] is None
        one = (await operator.get(f"/admin/v1/tenants/{busy.id}")).json()
        assert one["last_used_at"] == used[busy.id]

    async def test_have_names_of_their_own(self, operator: httpx.AsyncClient) -> None:
        await operator.post("/admin/v1/tenants", json={"name": "acme"})
        again = await operator.post("/admin/v1/tenants", json={"name": "acme"})
        assert (again.status_code, again.json()["error"]["code"]) == (409, "name_taken")
        assert again.json()["error"]["param"] == "name"

    @pytest.mark.parametrize("name", ["", "Acme", "a b", "-a", "a-", "../etc", "a\x00", "ä"])
    async def test_names_that_are_no_names_are_refused(
        self, operator: httpx.AsyncClient, name: str
    ) -> None:
        answer = await operator.post("/admin/v1/tenants", json={"name": name})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "name")

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("requests_per_minute", 0),
            ("requests_per_minute", -1),
            ("requests_per_minute", 1.5),
            ("requests_per_minute", "8"),
            ("requests_per_minute", True),
            ("requests_per_minute", 2**40),
            ("max_rank", 0),
            ("weight", 0),
            ("weight", -2),
            ("ttft_ms", 0),
            ("tpot_ms", -5),
            ("budget_percentile", 1),
            ("budget_percentile", 95),
            ("monthly_tokens", 10**30),
            ("nonsense", 1),
        ],
    )
    async def test_limits_that_are_no_limits_are_refused_by_name(
        self, operator: httpx.AsyncClient, platform: Platform, field: str, value: Any
    ) -> None:
        tenant = await make_tenant(platform)
        answer = await operator.patch(f"/admin/v1/tenants/{tenant.id}", json={field: value})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field

    async def test_come_in_pages_newest_first_without_gap_or_repetition(
        self, operator: httpx.AsyncClient, platform: Platform
    ) -> None:
        made = [(await make_tenant(platform)).id for _ in range(7)]
        seen: list[str] = []
        after: dict[str, Any] = {}
        while True:
            page = (await operator.get("/admin/v1/tenants", params={"limit": 3, **after})).json()
            seen += [tenant["id"] for tenant in page["data"]]
            if not page["has_more"]:
                break
            after = {"after": page["last_id"]}
        assert seen == sorted(made, reverse=True)

    @pytest.mark.parametrize("limit", ["0", "-1", "201", "x", "1e9"])
    async def test_a_page_has_bounds(self, operator: httpx.AsyncClient, limit: str) -> None:
        answer = await operator.get("/admin/v1/tenants", params={"limit": limit})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")


class TestKeys:
    async def test_a_new_keys_text_is_shown_once(
        self, operator: httpx.AsyncClient, platform: Platform
    ) -> None:
        tenant = await make_tenant(platform)
        made = await operator.post("/admin/v1/keys", json={"tenant_id": tenant.id, "name": "ci"})
        assert made.status_code == 201
        text = made.json()["key"]
        assert made.headers["cache-control"] == "no-store"
        for path in ("/admin/v1/keys", f"/admin/v1/keys/{made.json()['id']}", "/admin/v1/audit"):
            shown = (await operator.get(path)).text
            assert text not in shown
            assert text.rpartition("_")[2] not in shown

    async def test_a_nameless_key_is_listed_with_what_tells_it_from_others(
        self, operator: httpx.AsyncClient, platform: Platform
    ) -> None:
        tenant = await make_tenant(platform)
        key = await make_key(platform, tenant)
        listed = await operator.get("/admin/v1/keys", params={"tenant_id": tenant.id})
        (row,) = listed.json()["data"]
        assert row["name"] == ""
        assert row["prefix"] == f"lmx_{key.secret.public_id}"
        assert row["last4"] == key.secret.text[-4:]
        assert row["last_used_at"] is None

    async def test_of_one_tenant_are_listed_without_anothers(
        self, operator: httpx.AsyncClient, platform: Platform
    ) -> None:
        mine, foreign = await make_tenant(platform), await make_tenant(platform)
        key = await make_key(platform, mine)
        await make_key(platform, foreign)
        listed = await operator.get("/admin/v1/keys", params={"tenant_id": mine.id})
        assert [row["id"] for row in listed.json()["data"]] == [key.row.id]

    @pytest.mark.parametrize(
        "body",
        [
            {},
            {"tenant_id": "TENANT", "operator": True},
            {"tenant_id": "TENANT", "adapters": [""]},
            {"tenant_id": "TENANT", "adapters": ["a"] * 101},
            {"operator": True, "adapters": ["a"]},
            {"tenant_id": "TENANT", "expires_at": "2020-01-01T00:00:00Z"},
            {"tenant_id": "TENANT", "expires_at": "2030-01-01T00:00:00"},
            {"tenant_id": "TENANT", "requests_per_minute": 0},
            {"tenant_id": "TENANT", "secret": "mine"},
        ],
    )
    async def test_that_make_no_sense_are_refused_by_field(
        self, operator: httpx.AsyncClient, platform: Platform, body: dict[str, Any]
    ) -> None:
        tenant = await make_tenant(platform)
        body = {k: tenant.id if v == "TENANT" else v for k, v in body.items()}
        answer = await operator.post("/admin/v1/keys", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"]

    async def test_of_an_unknown_tenant_are_a_404(self, operator: httpx.AsyncClient) -> None:
        answer = await operator.post("/admin/v1/keys", json={"tenant_id": "ten_none"})
        assert answer.status_code == 404

    async def test_revoking_twice_is_revoking_once(
        self, operator: httpx.AsyncClient, platform: Platform
    ) -> None:
        key = await make_key(platform, await make_tenant(platform))
        for _ in range(2):
            answer = await operator.post(f"/admin/v1/keys/{key.row.id}/revoke")
            assert answer.json()["state"] == "revoked"
        log = await operator.get("/admin/v1/audit", params={"action": "key.revoke"})
        assert len(log.json()["data"]) == 1


class TestUsers:
    async def test_are_invited_by_a_link_that_is_shown_once(
        self, operator: httpx.AsyncClient, platform: Platform
    ) -> None:
        tenant = await make_tenant(platform)
        made = await operator.post(
            "/admin/v1/users",
            json={"email": "Ada@Example.com", "role": "tenant_admin", "tenant_id": tenant.id},
        )
        assert made.status_code == 201
        assert made.json()["url"].startswith(f"{platform.settings.public_url}/console/invitation/")
        token = made.json()["url"].rpartition("/")[2]
        listed = await operator.get("/admin/v1/users", params={"tenant_id": tenant.id})
        assert [row["email"] for row in listed.json()["data"]] == ["ada@example.com"]
        assert token not in listed.text
        assert token not in (await operator.get("/admin/v1/audit")).text

    async def test_change_role_are_suspended_and_resumed(
        self, operator: httpx.AsyncClient, platform: Platform
    ) -> None:
        user = await make_user(platform, await make_tenant(platform))
        path = f"/admin/v1/users/{user.id}"
        assert (await operator.patch(path, json={"role": "tenant_viewer"})).json()["role"] == (
            "tenant_viewer"
        )
        assert (await operator.post(f"{path}/suspend")).json()["status"] == "suspended"
        assert (await operator.post(f"{path}/resume")).json()["status"] == "active"
        assert "/console/password-reset/" in (await operator.post(f"{path}/reset")).json()["url"]

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({"role": "tenant_admin", "tenant_id": "TENANT"}, "email"),
            ({"email": "x@y.z", "role": "root"}, "role"),
            ({"email": "x@y.z", "role": "operator", "tenant_id": "TENANT"}, "tenant_id"),
            ({"email": "x@y.z", "role": "tenant_admin"}, "tenant_id"),
            ({"email": "x@y.z", "role": "operator", "password": "p"}, "password"),
        ],
    )
    async def test_that_make_no_sense_are_refused_by_field(
        self,
        operator: httpx.AsyncClient,
        platform: Platform,
        body: dict[str, Any],
        param: str,
    ) -> None:
        tenant = await make_tenant(platform)
        body = {k: tenant.id if v == "TENANT" else v for k, v in body.items()}
        answer = await operator.post("/admin/v1/users", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


class TestAudit:
    async def test_names_who_did_what_to_what_in_which_request(
        self, operator: httpx.AsyncClient
    ) -> None:
        made = await operator.post("/admin/v1/tenants", json={"name": "acme"})
        log = await operator.get("/admin/v1/audit", params={"action": "tenant.create"})
        (event,) = log.json()["data"]
        assert event["target"] == made.json()["id"]
        assert event["actor_kind"] == "operator"
        assert event["request_id"] == made.headers["x-request-id"]

    async def test_has_no_route_that_changes_it(self, operator: httpx.AsyncClient) -> None:
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            answer = await operator.request(method, "/admin/v1/audit")
            assert answer.status_code == 405


class TestConsoleSessions:
    async def test_an_operators_session_may_use_the_operator_api(
        self, client: httpx.AsyncClient, platform: Platform
    ) -> None:
        client.cookies.update(await sign_in(platform, await make_user(platform)))
        assert (await client.get("/admin/v1/tenants")).status_code == 200
        assert (await client.post("/admin/v1/tenants", json={"name": "a"})).status_code == 201

    async def test_a_tenants_session_may_not(
        self, client: httpx.AsyncClient, platform: Platform
    ) -> None:
        user = await make_user(platform, await make_tenant(platform))
        client.cookies.update(await sign_in(platform, user))
        answer = await client.get("/admin/v1/tenants")
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "operator_only")

    async def test_a_one_time_password_must_be_changed_first(
        self, client: httpx.AsyncClient, platform: Platform
    ) -> None:
        user = await make_user(platform, must_change=True)
        client.cookies.update(await sign_in(platform, user))
        answer = await client.get("/admin/v1/tenants")
        assert answer.json()["error"]["code"] == "password_change_needed"

    async def test_another_site_cannot_use_the_session(
        self, client: httpx.AsyncClient, platform: Platform
    ) -> None:
        client.cookies.update(await sign_in(platform, await make_user(platform)))
        answer = await client.post(
            "/admin/v1/tenants", json={"name": "a"}, headers={"origin": "https://evil.example"}
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "cross_site")

    async def test_nobody_is_a_401(self, client: httpx.AsyncClient) -> None:
        for cookie in ({}, {"loramux_session": "x"}, {"loramux_session": "x" * 4000}):
            client.cookies.clear()
            client.cookies.update(cookie)
            assert (await client.get("/admin/v1/tenants")).status_code == 401
