"""Queries of the engines' rows."""

from collections.abc import Sequence

from sqlalchemy import or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.engines.models import EngineRecord


async def everyone(session: AsyncSession) -> Sequence[EngineRecord]:
    """In the order in which they were first seen."""
    rows = await session.scalars(
        select(EngineRecord).order_by(EngineRecord.first_seen_at, EngineRecord.name)
    )
    return rows.all()


async def find(session: AsyncSession, reference: str) -> EngineRecord | None:
    """By id, name or address."""
    rows = await session.scalars(
        select(EngineRecord).where(
            or_(
                EngineRecord.id == reference,
                EngineRecord.name == reference,
                EngineRecord.address == reference,
            )
        )
    )
    return rows.first()


async def addressed(session: AsyncSession, addresses: Sequence[str]) -> Sequence[EngineRecord]:
    rows = await session.scalars(select(EngineRecord).where(EngineRecord.address.in_(addresses)))
    return rows.all()
