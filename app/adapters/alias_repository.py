"""SQL of aliases and of their history."""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters.models import AliasChange


async def last_change(session: AsyncSession, adapter_id: str, name: str) -> AliasChange | None:
    """The newest one, also of an alias that is gone.

    By its parent: the adapter was found by its tenant.
    """
    rows = await session.scalars(
        select(AliasChange)
        .where(AliasChange.adapter_id == adapter_id, AliasChange.name == name)
        .order_by(AliasChange.revision.desc())
        .limit(1)
    )
    return rows.first()


async def change_numbered(
    session: AsyncSession, adapter_id: str, name: str, revision: int
) -> AliasChange | None:
    """By its parent: the adapter was found by its tenant."""
    rows = await session.scalars(
        select(AliasChange).where(
            AliasChange.adapter_id == adapter_id,
            AliasChange.name == name,
            AliasChange.revision == revision,
        )
    )
    return rows.first()


async def page_changes(
    session: AsyncSession, adapter_id: str, name: str, *, before: int | None, limit: int
) -> Sequence[AliasChange]:
    """Newest first; `before` is the revision that the page before ended with.

    By its parent: the adapter was found by its tenant.
    """
    query = select(AliasChange).where(
        AliasChange.adapter_id == adapter_id, AliasChange.name == name
    )
    if before is not None:
        query = query.where(AliasChange.revision < before)
    return (await session.scalars(query.order_by(AliasChange.revision.desc()).limit(limit))).all()


async def changes_since(
    session: AsyncSession, adapter_id: str, name: str, since: datetime, limit: int
) -> Sequence[AliasChange]:
    """Changes after `since`, newest first. By its parent: the adapter was found by its tenant."""
    rows = await session.scalars(
        select(AliasChange)
        .where(
            AliasChange.adapter_id == adapter_id,
            AliasChange.name == name,
            AliasChange.at > since,
        )
        .order_by(AliasChange.revision.desc())
        .limit(limit)
    )
    return rows.all()
