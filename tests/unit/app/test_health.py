"""/healthz, /readyz, /metrics."""

import asyncio

import httpx
import pytest
from pydantic import SecretStr

from app.db import migrate
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
        assert (answer.status_code, answer.json()) == (503, {"status": "not ready"})

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
