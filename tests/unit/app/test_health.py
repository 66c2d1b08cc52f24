"""/healthz, /readyz, /metrics."""

import asyncio
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from app.db import migrate
from app.parts import checks, folder_check, redis_check
from app.platform import CheckResult, Platform
from app.settings import Settings
from tests.factories import bearer, make_key, make_tenant, make_user, sign_in


async def broken() -> CheckResult:
    return CheckResult(False, "the engine at ipc:///secret/path is gone")


class TestReadiness:
    async def test_is_said_when_every_part_answers(
        self, client: httpx.AsyncClient, platform: Platform
    ) -> None:
        only_database(platform)
        answer = await client.get("/readyz")
        assert (answer.status_code, answer.json()) == (200, {"status": "ready"})

    async def test_is_denied_when_one_part_does_not(
        self, client: httpx.AsyncClient, platform: Platform
    ) -> None:
        platform.checks["engine"] = broken
        answer = await client.get("/readyz")
        assert answer.status_code == 503
        assert answer.json()["status"] == "not ready"
        assert "engine" in answer.json()["missing"]
        assert "secret" not in answer.text

    async def test_a_part_that_calls_do_not_need_is_named_and_denies_nothing(
        self, client: httpx.AsyncClient, platform: Platform
    ) -> None:
        async def full() -> CheckResult:
            return CheckResult(False, "the folder cannot be written", needed=False)

        only_database(platform)
        platform.checks["queue"] = full
        answer = await client.get("/readyz")
        assert answer.status_code == 200
        assert answer.json() == {"status": "ready", "degraded": ["queue"]}

    async def test_is_denied_while_the_process_ends(
        self, client: httpx.AsyncClient, platform: Platform
    ) -> None:
        only_database(platform)
        platform.drain.begin()
        answer = await client.get("/readyz")
        assert (answer.status_code, answer.json()) == (503, {"status": "draining"})

    async def test_is_denied_when_one_part_hangs(
        self, client: httpx.AsyncClient, platform: Platform, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def hangs() -> CheckResult:
            await asyncio.sleep(3600)
            return CheckResult(True)

        monkeypatch.setattr("app.health.CHECK_TIMEOUT_S", 0.05)
        platform.checks["engine"] = hangs
        assert (await client.get("/readyz")).status_code == 503

    async def test_tells_which_part_to_operators_alone(
        self, client: httpx.AsyncClient, platform: Platform
    ) -> None:
        platform.checks["engine"] = broken
        tenants = bearer(await make_key(platform, await make_tenant(platform)))
        operators = bearer(await make_key(platform, None))
        for headers in ({}, tenants, {"authorization": "Bearer nonsense"}):
            assert "checks" not in (await client.get("/readyz", headers=headers)).json()
        told = (await client.get("/readyz", headers=operators)).json()
        assert told["checks"]["engine"]["ok"] is False
        client.cookies.update(await sign_in(platform, await make_user(platform)))
        assert "checks" in (await client.get("/readyz")).json()

    async def test_is_denied_before_the_migration(
        self, client: httpx.AsyncClient, platform: Platform
    ) -> None:
        only_database(platform)
        operators = bearer(await make_key(platform, None))
        assert (await client.get("/readyz")).status_code == 200
        detail = (await client.get("/readyz", headers=operators)).json()["checks"]["database"]
        assert detail["ok"]
        await asyncio.to_thread(migrate, platform.db.url, "base")
        assert (await client.get("/readyz")).status_code == 503

    async def test_liveness_needs_no_part(
        self, client: httpx.AsyncClient, platform: Platform
    ) -> None:
        platform.checks["engine"] = broken
        assert (await client.get("/healthz")).json() == {"status": "ok"}


class TestParts:
    async def test_a_redis_that_is_away_is_missing(self) -> None:
        check = redis_check("redis://127.0.0.1:1/0", "Redis (limits)", needed=True)
        result = await check()
        assert (result.ok, result.needed) == (False, True)
        assert "Redis (limits)" in result.detail

    async def test_a_folder_that_is_still_to_be_made_is_well(self, tmp_path: Path) -> None:
        assert (await folder_check(tmp_path / "later", "the folder")()).ok

    async def test_every_part_that_the_settings_name_is_looked_at(self, platform: Platform) -> None:
        shared = platform.settings.model_copy(
            update={"redis_url": "redis://127.0.0.1:1/0", "broker_url": "redis://127.0.0.1:1/0"}
        )
        assert set(checks(replace(platform, settings=shared))) == {
            "limits",
            "queue",
            "adapter_store",
        }
        assert set(checks(platform)) == {"queue", "adapter_store"}


class TestMetrics:
    async def test_count_requests_by_route_template_and_never_by_path(
        self, client: httpx.AsyncClient
    ) -> None:
        await client.get("/admin/v1/tenants/ten_canary")
        await client.get("/v1/canary-path")
        text = (await client.get("/metrics")).text
        assert 'route="/admin/v1/tenants/{tenant_id}"' in text
        assert "canary" not in text

    async def test_without_a_token_are_for_this_machine_alone(
        self, client: httpx.AsyncClient
    ) -> None:
        assert (await client.get("/metrics")).status_code == 200

    async def test_from_another_machine_need_a_token(self, platform: Platform) -> None:
        from app.main import create_app

        transport = httpx.ASGITransport(create_app(platform=platform), client=("192.0.2.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as remote:
            assert (await remote.get("/metrics")).status_code == 403


class TestMetricsToken:
    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        return settings.model_copy(update={"metrics_token": SecretStr("scrape-me")})

    @pytest.mark.parametrize(
        ("header", "status"), [(None, 401), ("Bearer wrong", 403), ("Bearer scrape-me", 200)]
    )
    async def test_is_needed_once_it_is_set(
        self, client: httpx.AsyncClient, header: str | None, status: int
    ) -> None:
        headers = {} if header is None else {"authorization": header}
        assert (await client.get("/metrics", headers=headers)).status_code == status


def only_database(platform: Platform) -> None:
    """Leaves the one check that has nothing to do with engines."""
    for name in list(platform.checks):
        if name != "database":
            del platform.checks[name]
