"""A served api with one invented engine, one tenant, one key and one adapter."""

from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI

from app.keys.service import NewKey
from app.platform import Platform
from app.tenants.models import Tenant
from tests.factories import bearer, make_key, make_tenant
from tests.fake_engine import FakeEngine
from tests.serving import install_engines, make_ready_adapter, serve


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def app(platform: Platform, engine: FakeEngine) -> FastAPI:
    from app.main import create_app

    install_engines(platform, {"ipc://fake": engine})
    return create_app(platform=platform)


@pytest.fixture
async def tenant(platform: Platform) -> Tenant:
    tenant = await make_tenant(platform, "acme")
    await make_ready_adapter(platform, tenant, "support")
    return tenant


@pytest.fixture
async def key(platform: Platform, tenant: Tenant) -> NewKey:
    return await make_key(platform, tenant)


@pytest.fixture
async def api(app: FastAPI, platform: Platform, key: NewKey) -> AsyncIterator[httpx.AsyncClient]:
    """A client with the tenant's key, over a real socket."""
    async with (
        serve(app) as address,
        httpx.AsyncClient(base_url=address, headers=bearer(key), timeout=20) as client,
    ):
        await platform.engines.refresh()
        yield client
