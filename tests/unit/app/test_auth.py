"""Bearer keys on /v1 and /admin/v1, seen from outside."""

from datetime import timedelta
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from app.auth import ApiCaller
from app.caller import KeyLimits
from app.clock import FrozenClock
from app.keys import service as keys
from app.main import create_app
from app.platform import Platform
from app.tenants import service as tenants
from tests.factories import bearer, make_key, make_tenant


@pytest.fixture
def database_url(any_database_url: str) -> str:
    return any_database_url


@pytest.fixture
def app(platform: Platform) -> FastAPI:
    """The app with a route that tells who called."""
    app = create_app(platform=platform)

    @app.get("/v1/whoami")
    async def whoami(caller: ApiCaller) -> dict[str, Any]:
        return {
            "tenant": caller.tenant_id,
            "role": caller.role,
            "scope": None if caller.adapter_scope is None else sorted(caller.adapter_scope),
            "requests_per_minute": caller.limits.requests_per_minute,
            "max_rank": caller.limits.max_rank,
            "key_requests_per_minute": caller.key_limits.requests_per_minute,
        }

    return app


async def whoami(client: httpx.AsyncClient, text: str) -> httpx.Response:
    return await client.get("/v1/whoami", headers={"authorization": f"Bearer {text}"})


class TestAKeyThatWorks:
    async def test_brings_its_tenant_scope_and_limits(
        self, client: httpx.AsyncClient, platform: Platform
    ) -> None:
        tenant = await make_tenant(platform, requests_per_minute=7)
        key = await make_key(
            platform, tenant, adapters=["b", "a"], limits=KeyLimits(requests_per_minute=3)
        )
        body = (await whoami(client, key.secret.text)).json()
        assert body == {
            "tenant": tenant.id,
            "role": "api_key",
            "scope": ["a", "b"],
            "requests_per_minute": 7,
            "max_rank": platform.settings.max_rank,
            "key_requests_per_minute": 3,
        }

    async def test_is_asked_of_the_database_once_within_the_time_to_live(
        self, client: httpx.AsyncClient, platform: Platform, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        key = await make_key(platform, await make_tenant(platform))
        asked: list[str] = []
        load = keys.load_entry

        async def counted(session: Any, public_id: str, settings: Any) -> Any:
            asked.append(public_id)
            return await load(session, public_id, settings)

        monkeypatch.setattr(keys, "load_entry", counted)
        for _ in range(3):
            assert (await whoami(client, key.secret.text)).status_code == 200
        assert len(asked) == 1


class TestAKeyThatDoesNotWork:
    @pytest.mark.parametrize(
        ("header", "code"),
        [
            (None, "missing_api_key"),
            ("", "invalid_api_key"),
            ("Bearer", "invalid_api_key"),
            ("Basic dTpw", "invalid_api_key"),
            ("Bearer sk-something-else", "invalid_api_key"),
            ("Bearer lmx_", "invalid_api_key"),
            ("Bearer " + "x" * 5000, "invalid_api_key"),
        ],
    )
    async def test_is_a_401_in_openais_shape_with_a_remedy(
        self, client: httpx.AsyncClient, header: str | None, code: str
    ) -> None:
        headers = {} if header is None else {"authorization": header}
        answer = await client.get("/v1/whoami", headers=headers)
        assert answer.status_code == 401
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == code
        assert "lmx_" in error["message"]
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.headers["x-should-retry"] == "false"

    async def test_a_mistyped_one_never_reaches_the_database(
        self, client: httpx.AsyncClient, platform: Platform, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        key = await make_key(platform, await make_tenant(platform))

        async def unexpected(*_: Any) -> Any:
            raise AssertionError("the database was asked")

        monkeypatch.setattr(keys, "load_entry", unexpected)
        typed = key.secret.text[:-1] + ("0" if key.secret.text[-1] != "0" else "1")
        answer = await whoami(client, typed)
        assert answer.status_code == 401
        assert "checksum" in answer.json()["error"]["message"]

    async def test_the_right_public_id_with_another_secret_says_nothing_about_the_key(
        self, client: httpx.AsyncClient, platform: Platform, clock: FrozenClock
    ) -> None:
        from app.keys import token

        key = await make_key(platform, await make_tenant(platform))
        async with platform.db.transaction() as session:
            await keys.revoke_key(
                session, key.row.id, now=clock.now(), actor="tests", tenant_id=None
            )
        forged = f"lmx_{key.secret.public_id}_" + "A" * token.SECRET_CHARACTERS
        known = await whoami(client, forged + token.checksum(forged))
        unknown = await whoami(client, token.mint().text)
        assert known.status_code == unknown.status_code == 401
        assert known.json() == unknown.json()

    async def test_a_revoked_one_is_refused_at_once_by_the_process_that_revoked_it(
        self, client: httpx.AsyncClient, platform: Platform
    ) -> None:
        key = await make_key(platform, await make_tenant(platform))
        operator = await make_key(platform, None)
        assert (await whoami(client, key.secret.text)).status_code == 200
        revoked = await client.post(f"/admin/v1/keys/{key.row.id}/revoke", headers=bearer(operator))
        assert revoked.status_code == 200
        answer = await whoami(client, key.secret.text)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "revoked_api_key"

    async def test_a_revocation_elsewhere_applies_within_the_time_to_live(
        self, client: httpx.AsyncClient, platform: Platform, clock: FrozenClock
    ) -> None:
        key = await make_key(platform, await make_tenant(platform))
        assert (await whoami(client, key.secret.text)).status_code == 200
        async with platform.db.transaction() as session:
            await keys.revoke_key(
                session, key.row.id, now=clock.now(), actor="tests", tenant_id=None
            )
        clock.advance(seconds=platform.settings.auth_cache_s)
        assert (await whoami(client, key.secret.text)).status_code == 401

    async def test_an_expired_one_is_refused_from_that_second_although_it_is_cached(
        self, client: httpx.AsyncClient, platform: Platform, clock: FrozenClock
    ) -> None:
        tenant = await make_tenant(platform)
        async with platform.db.transaction() as session:
            key = await keys.create_key(
                session,
                secrets=platform.secrets,
                now=clock.now(),
                actor="tests",
                tenant=tenant,
                expires_at=clock.now() + timedelta(seconds=1),
            )
        assert (await whoami(client, key.secret.text)).status_code == 200
        clock.advance(seconds=1)
        answer = await whoami(client, key.secret.text)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "expired_api_key")


class TestRotation:
    async def test_the_old_key_works_until_its_overlap_ends_and_not_one_second_longer(
        self, client: httpx.AsyncClient, platform: Platform, clock: FrozenClock
    ) -> None:
        key = await make_key(platform, await make_tenant(platform), name="ci", adapters=["a"])
        operator = await make_key(platform, None)
        rotated = await client.post(
            f"/admin/v1/keys/{key.row.id}/rotate",
            headers=bearer(operator),
            json={"overlap_s": 3600},
        )
        assert rotated.status_code == 201
        successor = rotated.json()
        assert successor["api_key"]["name"] == "ci"
        assert successor["api_key"]["adapters"] == ["a"]
        assert (await whoami(client, successor["key"])).status_code == 200
        clock.advance(seconds=3599)
        assert (await whoami(client, key.secret.text)).status_code == 200
        clock.advance(seconds=1)
        answer = await whoami(client, key.secret.text)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "revoked_api_key")
        assert (await whoami(client, successor["key"])).status_code == 200

    async def test_a_key_is_rotated_once(
        self, client: httpx.AsyncClient, platform: Platform
    ) -> None:
        key = await make_key(platform, await make_tenant(platform))
        operator = bearer(await make_key(platform, None))
        first = await client.post(f"/admin/v1/keys/{key.row.id}/rotate", headers=operator)
        second = await client.post(f"/admin/v1/keys/{key.row.id}/rotate", headers=operator)
        assert (first.status_code, second.status_code) == (201, 409)
        assert second.json()["error"]["code"] == "key_already_rotated"


class TestTenantsAndOperators:
    async def test_a_suspended_tenants_key_is_a_403_until_it_is_resumed(
        self, client: httpx.AsyncClient, platform: Platform
    ) -> None:
        tenant = await make_tenant(platform)
        key = await make_key(platform, tenant)
        operator = bearer(await make_key(platform, None))
        await client.post(f"/admin/v1/tenants/{tenant.id}/suspend", headers=operator)
        answer = await whoami(client, key.secret.text)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "tenant_suspended")
        await client.post(f"/admin/v1/tenants/{tenant.id}/resume", headers=operator)
        assert (await whoami(client, key.secret.text)).status_code == 200

    async def test_a_changed_limit_applies_to_a_cached_key_within_the_time_to_live(
        self, client: httpx.AsyncClient, platform: Platform, clock: FrozenClock
    ) -> None:
        tenant = await make_tenant(platform, requests_per_minute=7)
        key = await make_key(platform, tenant)
        assert (await whoami(client, key.secret.text)).json()["requests_per_minute"] == 7
        async with platform.db.transaction() as session:
            await tenants.update_tenant(
                session,
                tenant.id,
                changes={"requests_per_minute": 3},
                now=clock.now(),
                actor="another process",
            )
        clock.advance(seconds=platform.settings.auth_cache_s)
        assert (await whoami(client, key.secret.text)).json()["requests_per_minute"] == 3

    async def test_an_operators_key_never_reaches_v1(
        self, client: httpx.AsyncClient, platform: Platform, app: FastAPI
    ) -> None:
        operator = bearer(await make_key(platform, None))
        answer = await client.get("/v1/whoami", headers=operator)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "operator_key_on_v1")

    async def test_a_tenants_key_never_reaches_the_operator_api(
        self, client: httpx.AsyncClient, platform: Platform
    ) -> None:
        key = bearer(await make_key(platform, await make_tenant(platform)))
        for path in ("tenants", "keys", "users", "audit"):
            answer = await client.get(f"/admin/v1/{path}", headers=key)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "operator_only")


class TestLastUsed:
    async def test_is_written_within_a_minute_and_at_most_once_a_minute(
        self, client: httpx.AsyncClient, platform: Platform, clock: FrozenClock
    ) -> None:
        key = await make_key(platform, await make_tenant(platform))
        used = clock.now()
        await whoami(client, key.secret.text)
        assert await platform.last_used.flush() == 1
        assert await self._last_used(platform, key.row.id) == used
        clock.advance(seconds=30)
        again = clock.now()
        await whoami(client, key.secret.text)
        assert await platform.last_used.flush() == 0
        clock.advance(seconds=30)
        assert await platform.last_used.flush() == 1
        assert await self._last_used(platform, key.row.id) == again

    async def test_is_written_before_the_process_ends(
        self, client: httpx.AsyncClient, platform: Platform, clock: FrozenClock
    ) -> None:
        key = await make_key(platform, await make_tenant(platform))
        await whoami(client, key.secret.text)
        await platform.last_used.flush()
        clock.advance(seconds=5)
        await whoami(client, key.secret.text)
        assert await platform.last_used.flush(everything=True) == 1
        assert await self._last_used(platform, key.row.id) == clock.now()

    async def test_never_moves_back_when_several_processes_write(
        self, platform: Platform, clock: FrozenClock
    ) -> None:
        from app.keys import repository

        key = await make_key(platform, await make_tenant(platform))
        later, earlier = clock.now(), clock.now() - timedelta(seconds=9)
        async with platform.db.transaction() as session:
            await repository.write_last_used(session, {key.row.id: later})
            await repository.write_last_used(session, {key.row.id: earlier})
        assert await self._last_used(platform, key.row.id) == later

    async def _last_used(self, platform: Platform, key_id: str) -> Any:
        async with platform.db.reading() as session:
            return (await keys.find_key(session, key_id, tenant_id=None)).last_used_at


class TestSecretsRotation:
    async def test_a_key_moves_to_the_new_version_when_it_is_used(
        self, client: httpx.AsyncClient, platform: Platform, clock: FrozenClock
    ) -> None:
        from app.crypto import FileSource
        from app.keys import repository

        key = await make_key(platform, await make_tenant(platform))
        FileSource(platform.settings.root_secret_file).rotate()
        platform.secrets.reload()
        assert (await whoami(client, key.secret.text)).status_code == 200
        await platform.last_used.flush()
        async with platform.db.reading() as session:
            assert await repository.count_by_version(session, clock.now()) == {2: 1}
        clock.advance(seconds=60)
        assert (await whoami(client, key.secret.text)).status_code == 200
