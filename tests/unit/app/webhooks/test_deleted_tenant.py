"""A tenant that is deleted has no webhooks from that moment on."""

from sqlalchemy import text

from app.platform import Platform
from app.tenants import deletion
from app.tenants.models import Tenant
from tests.factories import make_key, make_tenant
from tests.unit.app.webhooks.api import Hooks
from tests.unit.app.webhooks.receiver import Receiver


async def test_its_endpoints_secrets_and_messages_are_gone_and_nobody_elses(
    hooks: Hooks, receiver: Receiver, platform: Platform, tenant: Tenant
) -> None:
    webhook, _ = await hooks.register(receiver.url("/deleted"))
    await hooks.test(webhook)
    other = hooks.of(await make_key(platform, await make_tenant(platform)))
    kept, _ = await other.register(receiver.url("/kept"))
    await other.test(kept)
    async with platform.db.transaction() as session:
        await deletion.begin(
            session, tenant.id, confirm=tenant.name, now=platform.clock.now(), actor="tests"
        )
    assert await hooks.sweep() == 1
    assert receiver.received[0].request_line.split()[1] == "/kept"
    async with platform.db.reading() as session:
        for table in ("webhook_endpoints", "webhook_events", "webhook_deliveries"):
            count = await session.scalar(text(f"SELECT count(*) FROM {table}"))
            assert count == 1, table
