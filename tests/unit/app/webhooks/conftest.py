"""A platform that may send to loopback, a tenant, and a receiver."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime

import httpx
import pytest
from fastapi import FastAPI

from app.clock import FrozenClock
from app.keys.service import NewKey
from app.platform import Platform
from app.settings import Settings
from app.tenants.models import Tenant
from app.webhooks.sender import Sender
from tests.factories import make_key, make_tenant
from tests.unit.app.webhooks.api import Hooks
from tests.unit.app.webhooks.receiver import Receiver, receive
from tests.validation_bench import Bench, make_bench


@pytest.fixture
def clock() -> FrozenClock:
    """Stands at the real time: the package's verifier compares with it."""
    return FrozenClock(datetime.now(UTC))


@pytest.fixture
def settings(settings: Settings) -> Settings:
    changes = {"webhook_allow_loopback": True, "webhook_timeout_s": 30.0}
    return settings.model_copy(update=changes)


@pytest.fixture
async def tenant(platform: Platform) -> Tenant:
    return await make_tenant(platform)


@pytest.fixture
async def key(platform: Platform, tenant: Tenant) -> NewKey:
    return await make_key(platform, tenant)


@pytest.fixture
async def bench(app: FastAPI) -> Bench:
    return await make_bench(app)


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receive() as opened:
        yield opened


@pytest.fixture
def sender(platform: Platform) -> Sender:
    return Sender(platform.settings, platform.clock)


@pytest.fixture
def hooks(
    client: httpx.AsyncClient, platform: Platform, key: NewKey, bench: Bench, sender: Sender
) -> Hooks:
    return Hooks(client, platform, key, sender)
