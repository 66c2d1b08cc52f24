"""Writes and reads the audit log."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from app.audit import repository
from app.audit.models import AuditEvent
from app.caller import Caller
from app.clock import SystemClock
from app.db import Database
from app.ids import new_id

_CLOCK = SystemClock()


def actor_id(actor: Caller | str) -> str:
    """A user's or key's id; for a part of the system (`worker`, `cli`), its name."""
    if isinstance(actor, str):
        return actor[:40]
    return actor.user_id or actor.key_id or "unknown"


async def record(
    session: AsyncSession,
    *,
    actor: Caller | str,
    action: str,
    target: str,
    tenant_id: str | None,
    detail: Mapping[str, Any] | None = None,
    at: datetime | None = None,
) -> None:
    """Adds an event to the caller's transaction: both are kept or neither is.

    `detail` holds plain JSON values and never secrets or message content.
    """
    repository.add(
        session,
        AuditEvent(
            id=new_id("aud"),
            at=at or _CLOCK.now(),
            actor_kind="system" if isinstance(actor, str) else actor.role,
            actor_id=actor_id(actor),
            actor_label=(actor if isinstance(actor, str) else actor.label)[:254],
            tenant_id=tenant_id,
            action=action,
            target=target[:120],
            detail=dict(detail or {}),
            request_id=structlog.contextvars.get_contextvars().get("request_id"),
        ),
    )
    await session.flush()


async def record_alone(
    db: Database,
    *,
    actor: Caller | str,
    action: str,
    target: str,
    tenant_id: str | None,
    detail: Mapping[str, Any] | None = None,
    at: datetime | None = None,
) -> None:
    """An event in a transaction of its own, for a refusal whose request is rolled back."""
    async with db.transaction() as session:
        await record(
            session,
            actor=actor,
            action=action,
            target=target,
            tenant_id=tenant_id,
            detail=detail,
            at=at,
        )


async def list_events(
    session: AsyncSession,
    *,
    tenant_id: str | None,
    action: str | None = None,
    target: str | None = None,
    after: str | None = None,
    limit: int = 100,
) -> list[AuditEvent]:
    """Newest first. `tenant_id=None`: an operator reads everything."""
    return await repository.page(
        session, tenant_id=tenant_id, action=action, target=target, after=after, limit=limit
    )
