"""Keys that may do less than their tenant: what they are refused, and what they cannot be."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from app.caller import KeyLimits
from app.clock import FrozenClock
from app.errors import InvalidRequest, RateLimited
from app.keys import service
from app.limits.open import open_limits
from app.main import create_app
from app.platform import Platform
from app.settings import Settings
from app.tenants.service import update_tenant
from tests.factories import bearer, make_caller, make_key, make_tenant

READS = ["/v1/models", "/v1/adapters", "/v1/usage", "/v1/limits"]


@asynccontextmanager
async def client_from(app: FastAPI, address: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client whose connection comes from the address."""
    transport = httpx.ASGITransport(app, client=(address, 50000))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as opened:
        yield opened


async def failures(platform: Platform) -> list[dict[str, Any]]:
    """The `authz_fail` events' details."""
    from app.audit.service import list_events

    async with platform.db.reading() as session:
        events = await list_events(session, tenant_id=None, action="authz_fail")
    return [event.detail for event in events]


class TestAReadOnlyKey:
    async def test_looks_at_everything(self, client: httpx.AsyncClient, platform: Platform) -> None:
        headers = bearer(await make_key(platform, await make_tenant(platform), access="read"))
        for path in READS:
            assert (await client.get(path, headers=headers)).status_code == 200, path

    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("POST", "/v1/chat/completions"),
            ("POST", "/v1/completions"),
            ("POST", "/v1/adapters"),
            ("DELETE", "/v1/adapters/support"),
            ("PUT", "/v1/adapters/support/aliases/live"),
        ],
    )
    async def test_neither_generates_nor_writes_and_is_told_why(
        self, client: httpx.AsyncClient, platform: Platform, method: str, path: str
    ) -> None:
        headers = bearer(await make_key(platform, await make_tenant(platform), access="read"))
        answer = await client.request(method, path, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "read_only_key")
        assert await failures(platform) == [{"reason": "read_only_key"}]

    async def test_of_an_operator_changes_no_tenant(
        self, client: httpx.AsyncClient, platform: Platform
    ) -> None:
        headers = bearer(await make_key(platform, None, access="read"))
        assert (await client.get("/admin/v1/tenants", headers=headers)).status_code == 200
        answer = await client.post("/admin/v1/tenants", headers=headers, json={"name": "acme"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "read_only_key")


class TestAnInferenceKey:
    @pytest.mark.parametrize("path", ["/v1/models", "/v1/limits"])
    async def test_lists_models_and_its_limits(
        self, client: httpx.AsyncClient, platform: Platform, path: str
    ) -> None:
        headers = bearer(await make_key(platform, await make_tenant(platform), access="inference"))
        assert (await client.get(path, headers=headers)).status_code == 200

    async def test_reaches_the_model_it_calls(
        self, client: httpx.AsyncClient, platform: Platform
    ) -> None:
        headers = bearer(await make_key(platform, await make_tenant(platform), access="inference"))
        body = {"model": "none", "messages": [{"role": "user", "content": "hi"}]}
        answer = await client.post("/v1/chat/completions", headers=headers, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")

    @pytest.mark.parametrize("path", ["/v1/adapters", "/v1/usage", "/v1/adapters/support"])
    async def test_sees_neither_adapters_nor_usage(
        self, client: httpx.AsyncClient, platform: Platform, path: str
    ) -> None:
        headers = bearer(await make_key(platform, await make_tenant(platform), access="inference"))
        answer = await client.get(path, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "inference_only_key")


class TestAKeyWithNetworks:
    async def test_works_from_its_network_and_nowhere_else(
        self, app: FastAPI, client: httpx.AsyncClient, platform: Platform
    ) -> None:
        tenant = await make_tenant(platform)
        headers = bearer(await make_key(platform, tenant, networks=["203.0.113.0/24"]))
        for address, expected in [("203.0.113.5", 200), ("198.51.100.1", 403)]:
            async with client_from(app, address) as there:
                assert (await there.get("/v1/models", headers=headers)).status_code == expected
        assert await failures(platform) == [{"reason": "source_network", "address": "198.51.100.1"}]

    async def test_does_not_believe_what_the_client_says_of_itself(
        self, app: FastAPI, client: httpx.AsyncClient, platform: Platform
    ) -> None:
        tenant = await make_tenant(platform)
        headers = bearer(await make_key(platform, tenant, networks=["203.0.113.0/24"]))
        async with client_from(app, "198.51.100.1") as outside:
            for claim in ("x-forwarded-for", "forwarded", "x-real-ip"):
                answer = await outside.get("/v1/models", headers={**headers, claim: "203.0.113.5"})
                assert answer.status_code == 403, claim

    async def test_is_only_told_to_whoever_has_the_secret(
        self, app: FastAPI, client: httpx.AsyncClient, platform: Platform
    ) -> None:
        from app.keys import token

        tenant = await make_tenant(platform)
        key = await make_key(platform, tenant, networks=["203.0.113.0/24"])
        forged = f"lmx_{key.secret.public_id}_" + "A" * token.SECRET_CHARACTERS
        headers = {"authorization": f"Bearer {forged}{token.checksum(forged)}"}
        async with client_from(app, "198.51.100.1") as outside:
            assert (await outside.get("/v1/models", headers=headers)).status_code == 401

    async def test_of_an_operator_is_held_to_them_too(
        self, app: FastAPI, client: httpx.AsyncClient, platform: Platform
    ) -> None:
        headers = bearer(await make_key(platform, None, networks=["203.0.113.0/24"]))
        async with client_from(app, "198.51.100.1") as outside:
            answer = await outside.get("/admin/v1/tenants", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "network_not_allowed")

    async def test_a_client_that_keeps_asking_does_not_fill_the_audit_log(
        self, app: FastAPI, client: httpx.AsyncClient, platform: Platform, clock: FrozenClock
    ) -> None:
        tenant = await make_tenant(platform)
        headers = bearer(await make_key(platform, tenant, networks=["203.0.113.0/24"]))
        async with client_from(app, "198.51.100.1") as outside:
            for _ in range(5):
                await outside.get("/v1/models", headers=headers)
            assert len(await failures(platform)) == 1
            clock.advance(seconds=60)
            await outside.get("/v1/models", headers=headers)
            assert len(await failures(platform)) == 2


class TestBehindAProxy:
    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        return settings.model_copy(update={"trusted_proxies": ["10.0.0.0/8"]})

    @pytest.fixture
    def app(self, platform: Platform) -> FastAPI:
        return create_app(platform=platform)

    @pytest.mark.parametrize(
        ("peer", "forwarded", "expected"),
        [
            ("10.0.0.2", "203.0.113.5", 200),
            ("10.0.0.2", "198.51.100.1", 403),
            ("10.0.0.2", "203.0.113.5, 198.51.100.1", 403),  # the client wrote the first itself
            ("10.0.0.2", "198.51.100.1, 203.0.113.5, 10.0.0.3", 200),  # two proxies of ours
            ("198.51.100.1", "203.0.113.5", 403),  # no proxy of ours
        ],
    )
    async def test_the_client_is_the_last_address_that_no_trusted_proxy_has(
        self,
        app: FastAPI,
        client: httpx.AsyncClient,
        platform: Platform,
        peer: str,
        forwarded: str,
        expected: int,
    ) -> None:
        tenant = await make_tenant(platform)
        headers = bearer(await make_key(platform, tenant, networks=["203.0.113.0/24"]))
        async with client_from(app, peer) as proxied:
            answer = await proxied.get(
                "/v1/models", headers={**headers, "x-forwarded-for": forwarded}
            )
        assert answer.status_code == expected


class TestMakingOne:
    @pytest.fixture
    async def operator(self, platform: Platform) -> dict[str, str]:
        return bearer(await make_key(platform, None))

    @pytest.mark.parametrize(
        ("field", "value", "code"),
        [
            ("adapters", ["support", "suport"], "unknown_adapter"),
            ("adapters", [], "invalid_request"),
            ("networks", ["203.0.113.7/24"], "invalid_request"),
            ("networks", ["0.0.0.0/0"], "invalid_request"),
            ("access", "write", "invalid_value"),
            ("requests_per_minute", 11, "limit_above_tenant"),
            ("tokens_per_minute", 200_001, "limit_above_tenant"),  # the platform's default
        ],
    )
    async def test_what_restricts_nothing_or_names_nothing_is_refused_by_the_field(
        self,
        client: httpx.AsyncClient,
        platform: Platform,
        operator: dict[str, str],
        field: str,
        value: Any,
        code: str,
    ) -> None:
        tenant = await make_tenant(platform, requests_per_minute=10)
        await make_key(platform, tenant, adapters=["support"])
        body = {"tenant_id": tenant.id, field: value}
        answer = await client.post("/admin/v1/keys", headers=operator, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, code, field)
        if code == "unknown_adapter":
            assert "'suport'" in error["message"]
            assert "'support'" not in error["message"]

    async def test_another_tenants_adapter_is_as_unknown_as_none(
        self, client: httpx.AsyncClient, platform: Platform, operator: dict[str, str]
    ) -> None:
        mine, foreign = await make_tenant(platform), await make_tenant(platform)
        await make_key(platform, foreign, adapters=["theirs"])
        told = []
        for name in ("theirs", "nobody"):
            body = {"tenant_id": mine.id, "adapters": [name]}
            answer = await client.post("/admin/v1/keys", headers=operator, json=body)
            told.append((answer.status_code, answer.text.replace(name, "?")))
        assert told[0] == told[1]

    async def test_it_is_shown_with_its_restrictions_and_its_successor_has_them(
        self, client: httpx.AsyncClient, platform: Platform, operator: dict[str, str]
    ) -> None:
        tenant = await make_tenant(platform, requests_per_minute=10)
        body = {
            "tenant_id": tenant.id,
            "access": "read",
            "networks": ["203.0.113.0/24"],
            "requests_per_minute": 10,
        }
        made = await client.post("/admin/v1/keys", headers=operator, json=body)
        path = f"/admin/v1/keys/{made.json()['id']}/rotate"
        rotated = await client.post(path, headers=operator)
        for answer in (made, rotated):
            shown = answer.json()["api_key"]
            assert (shown["access"], shown["networks"]) == ("read", ["203.0.113.0/24"])
            assert shown["requests_per_minute"] == 10

    @pytest.mark.parametrize(
        "restrictions",
        [{"adapters": ["a"]}, {"access": "inference"}, {"limits": KeyLimits(max_concurrent=1)}],
    )
    async def test_an_operators_key_has_no_restriction_that_speaks_of_models(
        self, platform: Platform, restrictions: dict[str, Any]
    ) -> None:
        with pytest.raises(InvalidRequest):
            await make_key(platform, None, **restrictions)


async def test_a_tenants_limit_that_is_lowered_later_wins_over_the_keys(
    platform: Platform,
) -> None:
    tenant = await make_tenant(platform, requests_per_minute=10)
    key = await make_key(platform, tenant, limits=KeyLimits(requests_per_minute=5))
    async with platform.db.transaction() as session:
        lowered = await update_tenant(
            session,
            tenant.id,
            changes={"requests_per_minute": 2},
            now=platform.clock.now(),
            actor="tests",
        )
    caller = make_caller(
        platform, lowered, key_id=key.row.id, key_limits=service.key_limits(key.row)
    )
    limits = open_limits(None, platform.clock)
    for number in range(2):
        await limits.reserve(caller, f"req_{number}", 1)
    with pytest.raises(RateLimited) as caught:
        await limits.reserve(caller, "req_2", 1)
    assert "the limit is 2 requests" in caught.value.message
