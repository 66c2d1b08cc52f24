"""Tells webhooks what became of a version, in the transaction in which it became that."""

from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters import repository, states
from app.settings import Settings
from app.webhooks import outbox

EVENTS = {
    states.READY: outbox.VERSION_READY,
    states.REJECTED: outbox.VERSION_REJECTED,
    states.FAILED: outbox.VERSION_FAILED,
}


async def announce(
    session: AsyncSession, version_id: str, settings: Settings, now: datetime
) -> None:
    """After the version's move to one of the states in EVENTS; another one is nobody's news."""
    version = await repository.version_by_id(session, version_id)
    if version is None:
        return
    await session.refresh(version)
    if version.state not in EVENTS:
        return
    adapter = await repository.adapter_of(session, version)
    await outbox.emit(
        session,
        tenant_id=version.tenant_id,
        type_=EVENTS[version.state],
        data={
            "adapter": adapter.name,
            "adapter_id": adapter.id,
            "version": version.number,
            "version_id": version.id,
            "state": version.state,
            "code": version.code,
            "reason": version.reason,
        },
        now=now,
        give_up_s=settings.webhook_give_up_s,
    )
