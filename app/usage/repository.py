"""The ledger's SQL: rows and months. What is added up by hour and day: sums_repository."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import func, literal_column, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.usage.entries import hour_of
from app.usage.models import UsageMonth, UsageRecord

EXPORTED = (
    "request_id",
    "started_at",
    "closed_at",
    "tenant_id",
    "key_id",
    "user_id",
    "adapter_id",
    "version_id",
    "model",
    "endpoint",
    "streamed",
    "status",
    "error_code",
    "finish_reasons",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "overshoot_tokens",
    "queue_ms",
    "adapter_wait_ms",
    "ttft_ms",
    "total_ms",
    "prefill_us",
    "decode_us",
    "adapter_byte_s",
)
"""Columns of an export of single requests."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request ended."""

    status: str
    error_code: str | None
    completion_tokens: int
    ttft_ms: float | None
    total_ms: float | None


async def move_open(session: AsyncSession, request_id: str, engine: str) -> None:
    """Names another engine in an open row: the one whose journal will count it.

    Of any tenant: for the api process that runs the request.
    """
    await session.execute(
        update(UsageRecord)
        .where(UsageRecord.request_id == request_id, UsageRecord.status == "open")
        .values(engine=engine)
        .execution_options(synchronize_session=False)
    )


async def month_used(session: AsyncSession, owner_id: str, month: str) -> tuple[int, int]:
    """(billed tokens, reserved tokens) of one owner in one month."""
    found = await session.execute(
        select(UsageMonth.tokens, UsageMonth.reserved).where(
            UsageMonth.owner_id == owner_id, UsageMonth.month == month
        )
    )
    row = found.first()
    return (0, 0) if row is None else (row[0], row[1])


async def renew_leases(
    session: AsyncSession, request_ids: Sequence[str], lease_until: datetime
) -> None:
    """Of any tenant: for the api process that runs the requests."""
    await session.execute(
        update(UsageRecord)
        .where(UsageRecord.request_id.in_(request_ids), UsageRecord.status == "open")
        .values(lease_until=lease_until)
        .execution_options(synchronize_session=False)
    )


async def expired(
    session: AsyncSession, now: datetime, most: int, *, after: str = ""
) -> list[tuple[str, str, datetime]]:
    """(request id, engine, lease end) of open rows whose lease ended, in the order of the ids.

    Of any tenant: for the sweep.
    """
    found = await session.execute(
        select(UsageRecord.request_id, UsageRecord.engine, UsageRecord.lease_until)
        .where(
            UsageRecord.status == "open",
            UsageRecord.lease_until < now,
            UsageRecord.request_id > after,
        )
        .order_by(UsageRecord.request_id)
        .limit(most)
    )
    return [(row[0], row[1], row[2]) for row in found]


async def count_open(session: AsyncSession, tenant_id: str) -> int:
    """The tenant's calls that have not ended.

    All open rows are looked at, for they are few and have an index of their own; a tenant's rows
    may be millions.
    """
    running = (
        select(UsageRecord.tenant_id)
        .where(UsageRecord.status == literal_column("'open'"))
        .cte("running")
        .prefix_with("MATERIALIZED")
    )
    found = select(func.count()).select_from(running).where(running.c.tenant_id == tenant_id)
    return await session.scalar(found) or 0


async def get(session: AsyncSession, request_id: str) -> UsageRecord | None:
    """Of any tenant: for tests and the sweep, which have only the id."""
    return await session.get(UsageRecord, request_id)


async def closed_between(
    session: AsyncSession,
    tenant_id: str | None,
    start: datetime,
    end: datetime,
    *,
    after: tuple[datetime, str] | None,
    most: int,
    key_id: str | None = None,
    adapter_id: str | None = None,
    model: str | None = None,
) -> list[Sequence[Any]]:
    """Closed rows that began in [start, end), by the time they began: the columns of EXPORTED."""
    row = UsageRecord
    wanted = (
        (row.tenant_id, tenant_id),
        (row.key_id, key_id),
        (row.adapter_id, adapter_id),
        (row.model, model),
    )
    statement = select(*(getattr(row, name) for name in EXPORTED)).where(
        row.started_at >= start,
        row.started_at < end,
        row.started_hour >= hour_of(start),
        row.started_hour <= hour_of(end),
        row.status != "open",
        *(column == value for column, value in wanted if value is not None),
    )
    if after is not None:
        at, request_id = after
        statement = statement.where(
            row.started_at >= at,
            or_(row.started_at > at, row.request_id > request_id),
        )
    statement = statement.order_by(row.started_at, row.request_id).limit(most)
    return [tuple(found) for found in await session.execute(statement)]


async def outcomes(
    session: AsyncSession, tenant_id: str, start: datetime, most: int
) -> list[Outcome]:
    """The tenant's closed requests that began since `start`, the newest first."""
    found = await session.execute(
        select(
            UsageRecord.status,
            UsageRecord.error_code,
            UsageRecord.completion_tokens,
            UsageRecord.ttft_ms,
            UsageRecord.total_ms,
        )
        .where(
            UsageRecord.tenant_id == tenant_id,
            UsageRecord.started_at >= start,
            UsageRecord.status != "open",
        )
        .order_by(UsageRecord.started_at.desc())
        .limit(most)
    )
    return [Outcome(*row) for row in found]


def lease_end(now: datetime, lease_s: float) -> datetime:
    return now + timedelta(seconds=lease_s)
