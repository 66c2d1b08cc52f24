"""The unmodified openai package against a served api with an invented engine."""

from collections.abc import AsyncIterator

import openai
import pytest
from fastapi import FastAPI

from app.keys.service import NewKey
from app.main import create_app
from app.platform import Platform
from app.tenants.models import Tenant
from tests.factories import make_key, make_tenant
from tests.fake_engine import FakeEngine
from tests.serving import install_engines, make_ready_adapter, serve


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def app(platform: Platform, engine: FakeEngine) -> FastAPI:
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
async def address(app: FastAPI, platform: Platform) -> AsyncIterator[str]:
    async with serve(app) as address:
        await platform.engines.refresh()
        yield address


@pytest.fixture
async def client(address: str, key: NewKey) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{address}/v1", api_key=key.secret.text, max_retries=0, timeout=30
    ) as opened:
        yield opened
