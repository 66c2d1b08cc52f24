"""Thresholds of the month's tokens, told once a month each."""

from datetime import timedelta

import pytest
from sqlalchemy import delete, insert

from app.clock import FrozenClock
from app.platform import Platform
from app.tenants.models import Tenant
from app.usage.entries import month_of
from app.usage.models import UsageMonth
from app.webhooks.quotas import tell_thresholds
from tests.factories import make_tenant
from tests.unit.app.webhooks.api import Hooks
from tests.unit.app.webhooks.receiver import Receiver


@pytest.fixture
async def tenant(platform: Platform) -> Tenant:
    return await make_tenant(platform, monthly_tokens=1000)


async def use(platform: Platform, tenant: Tenant, tokens: int) -> None:
    """The month's tokens are these now."""
    month = month_of(platform.clock.now())
    async with platform.db.transaction() as session:
        await session.execute(delete(UsageMonth).where(UsageMonth.owner_id == tenant.id))
        await session.execute(
            insert(UsageMonth).values(owner_id=tenant.id, month=month, tokens=tokens, reserved=500)
        )


async def told(hooks: Hooks, receiver: Receiver) -> list[int]:
    """The thresholds that reached the receiver since it was last asked."""
    platform = hooks.platform
    await tell_thresholds(platform.db, platform.settings, platform.clock)
    receiver.received.clear()
    await hooks.sweep()
    return [
        int(message.body.split(b'"threshold_percent":')[1].split(b",")[0])
        for message in receiver.received
    ]


async def test_each_threshold_is_told_once_a_month_with_its_figures(
    hooks: Hooks, receiver: Receiver, platform: Platform, tenant: Tenant, clock: FrozenClock
) -> None:
    _, secret = await hooks.register(receiver.url())
    await use(platform, tenant, 799)
    assert await told(hooks, receiver) == []
    await use(platform, tenant, 800)
    assert await told(hooks, receiver) == [80]
    message = receiver.received[0].verify(secret)
    assert isinstance(message, dict)
    assert message["data"] == {
        "month": month_of(clock.now()),
        "threshold_percent": 80,
        "limit_tokens": 1000,
        "used_tokens": 800,
    }
    await use(platform, tenant, 999)
    assert await told(hooks, receiver) == []
    await use(platform, tenant, 1000)
    assert await told(hooks, receiver) == [100]
    assert await told(hooks, receiver) == []
    clock.at += timedelta(days=32)
    await use(platform, tenant, 900)
    assert await told(hooks, receiver) == [80]


async def test_both_that_were_crossed_at_once_are_told(
    hooks: Hooks, receiver: Receiver, platform: Platform, tenant: Tenant
) -> None:
    await hooks.register(receiver.url())
    await use(platform, tenant, 5000)
    assert sorted(await told(hooks, receiver)) == [80, 100]


async def test_a_tenant_without_a_limit_or_without_a_listener_is_told_nothing(
    hooks: Hooks, receiver: Receiver, platform: Platform, tenant: Tenant
) -> None:
    await use(platform, tenant, 5000)
    await hooks.register(receiver.url(), events=["version.ready"])
    assert await told(hooks, receiver) == []
    assert await tell_thresholds(platform.db, platform.settings, platform.clock) == 0


async def test_a_limit_that_is_raised_again_does_not_tell_twice(
    hooks: Hooks, receiver: Receiver, platform: Platform, tenant: Tenant
) -> None:
    await hooks.register(receiver.url())
    await use(platform, tenant, 850)
    assert await told(hooks, receiver) == [80]
    async with platform.db.transaction() as session:
        row = await session.get_one(Tenant, tenant.id)
        row.monthly_tokens = 10_000
    await use(platform, tenant, 8500)
    assert await told(hooks, receiver) == []
