"""The webhooks' Celery tasks, as plain coroutines; `app.worker` gives them to Celery."""

from app.platform import Platform
from app.webhooks import delivery, quotas, service
from app.webhooks.sender import Sender

RESEAL_BATCH = 500


def make_sender(platform: Platform) -> Sender:
    return Sender(platform.settings, platform.clock)


async def deliver(platform: Platform, delivery_id: str) -> str:
    """One delivery of `webhooks.deliver`."""
    return await delivery.deliver(platform, make_sender(platform), delivery_id, hinted=True)


async def sweep(platform: Platform) -> str:
    """Sends what is due, and what crashes and lost messages left."""
    return f"{await delivery.sweep(platform, make_sender(platform))} webhooks sent"


async def tell_quotas(platform: Platform) -> str:
    told = await quotas.tell_thresholds(platform.db, platform.settings, platform.clock)
    return f"{told} tenants crossed a threshold"


async def clean(platform: Platform) -> str:
    """Old deliveries go; secrets move to the root secret's current version."""
    removed = await delivery.clean(platform)
    async with platform.db.transaction() as session:
        moved = await service.reseal(session, platform.secrets, platform.clock.now(), RESEAL_BATCH)
    return f"{removed} deliveries removed, {moved} secrets moved"
