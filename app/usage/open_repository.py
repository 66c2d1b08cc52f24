"""SQL of the ledger's open rows of all tenants: for the operator's page of the system."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.usage.models import UsageRecord


@dataclass(frozen=True, slots=True)
class OpenRows:
    """`expired`: their process has not renewed the lease, so the sweep will close them."""

    open: int
    expired: int
    oldest: datetime | None


async def open_rows(session: AsyncSession, now: datetime) -> OpenRows:
    """Of any tenant: for the operator."""
    row = (
        await session.execute(
            select(
                func.count(),
                func.count().filter(UsageRecord.lease_until < now),
                func.min(UsageRecord.started_at),
            ).where(UsageRecord.status == "open")
        )
    ).one()
    return OpenRows(row[0], row[1], row[2])
