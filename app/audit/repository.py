"""SQL of the audit log: it is written and read, never changed."""

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.audit.models import AuditEvent


def add(session: AsyncSession, event: AuditEvent) -> None:
    session.add(event)


async def page(
    session: AsyncSession,
    *,
    tenant_id: str | None,
    action: str | None,
    target: str | None,
    after: str | None,
    limit: int,
) -> list[AuditEvent]:
    """Newest first; None does not filter."""
    query = select(AuditEvent).order_by(AuditEvent.id.desc()).limit(limit)
    if tenant_id is not None:
        query = query.where(AuditEvent.tenant_id == tenant_id)
    if action is not None:
        query = query.where(AuditEvent.action == action)
    if target is not None:
        query = query.where(AuditEvent.target == target)
    if after is not None:
        query = query.where(AuditEvent.id < after)
    return list((await session.execute(query)).scalars())
