"""The ledger's SQL: rows and months. What is added up by hour and day: sums_repository."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, func, insert, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from app.usage.entries import FinalEntry, OpenEntry, hour_of, month_of
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
class Closed:
    """What a closing needs from the row that was open."""

    tenant_id: str
    key_id: str | None
    adapter_id: str | None
    model: str
    reserved_tokens: int
    started_at: datetime
    started_hour: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request ended."""

    status: str
    error_code: str | None
    completion_tokens: int
    ttft_ms: float | None
    total_ms: float | None


async def insert_open(
    session: AsyncSession, entry: OpenEntry, at: datetime, lease_until: datetime
) -> None:
    """Raises IntegrityError when the request id already has a row."""
    await session.execute(
        insert(UsageRecord).values(
            request_id=entry.request_id,
            tenant_id=entry.tenant_id,
            key_id=entry.key_id,
            user_id=entry.user_id,
            adapter_id=entry.adapter_id,
            version_id=entry.version_id,
            alias=entry.alias,
            model=entry.model,
            endpoint=entry.endpoint,
            streamed=entry.streamed,
            engine=entry.engine,
            status="open",
            reserved_tokens=entry.reserved_tokens,
            prompt_tokens=0,
            cached_tokens=0,
            completion_tokens=0,
            overshoot_tokens=0,
            started_at=at,
            started_hour=hour_of(at),
            lease_until=lease_until,
        )
    )


async def reserve_month(
    session: AsyncSession, owner_id: str, month: str, tokens: int, limit: int | None
) -> int | None:
    """Reserves tokens of a month in one statement: what is billed and reserved then.

    None when they do not fit the limit.
    """
    if limit is not None and tokens > limit:
        return None
    row = {"owner_id": owner_id, "month": month, "tokens": 0, "reserved": tokens}
    fits: ColumnElement[bool] | None = None
    if limit is not None:
        fits = UsageMonth.tokens + UsageMonth.reserved + tokens <= limit
    added = {"reserved": UsageMonth.reserved + tokens}
    keys = [UsageMonth.owner_id, UsageMonth.month]
    statement: Any
    if session.get_bind().dialect.name == "postgresql":
        statement = postgresql.insert(UsageMonth).values(row)
    else:
        statement = sqlite.insert(UsageMonth).values(row)
    statement = statement.on_conflict_do_update(index_elements=keys, set_=added, where=fits)
    taken = await session.execute(statement.returning(UsageMonth.tokens + UsageMonth.reserved))
    total: int | None = taken.scalar()
    return total


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


async def close_row(session: AsyncSession, entry: FinalEntry, closed_by: str) -> Closed | None:
    """Closes an open row; None when the request has none (any more).

    Of any tenant: the row says whose it is.
    """
    result = await session.execute(
        update(UsageRecord)
        .where(UsageRecord.request_id == entry.request_id, UsageRecord.status == "open")
        .values(
            status=entry.status,
            closed_by=closed_by,
            error_code=entry.error_code,
            finish_reasons=entry.finish_reasons,
            prompt_tokens=entry.prompt_tokens,
            cached_tokens=entry.cached_tokens,
            completion_tokens=entry.completion_tokens,
            overshoot_tokens=entry.overshoot_tokens,
            closed_at=entry.closed_at,
            queue_ms=entry.queue_ms,
            adapter_wait_ms=entry.adapter_wait_ms,
            ttft_ms=entry.ttft_ms,
            total_ms=entry.total_ms,
            prefill_us=entry.prefill_us,
            decode_us=entry.decode_us,
            adapter_byte_s=entry.adapter_byte_s,
        )
        .returning(
            UsageRecord.tenant_id,
            UsageRecord.key_id,
            UsageRecord.adapter_id,
            UsageRecord.model,
            UsageRecord.reserved_tokens,
            UsageRecord.started_at,
            UsageRecord.started_hour,
        )
        .execution_options(synchronize_session=False)
    )
    row = result.first()
    return None if row is None else Closed(*row)


async def settle_months(session: AsyncSession, closed: Iterable[tuple[Closed, FinalEntry]]) -> None:
    """Turns reservations into billed tokens, one update an owner, always in the same order."""
    changes: dict[tuple[str, str], tuple[int, int]] = {}
    for row, entry in closed:
        for owner in filter(None, (row.key_id, row.tenant_id)):
            key = (owner, month_of(row.started_at))
            billed, released = changes.get(key, (0, 0))
            changes[key] = (billed + entry.billed_tokens, released + row.reserved_tokens)
    for (owner, month), (billed, released) in sorted(changes.items()):
        await session.execute(
            update(UsageMonth)
            .where(UsageMonth.owner_id == owner, UsageMonth.month == month)
            .values(tokens=UsageMonth.tokens + billed, reserved=UsageMonth.reserved - released)
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
    """The tenant's calls that have not ended."""
    count = await session.scalar(
        select(func.count())
        .select_from(UsageRecord)
        .where(UsageRecord.tenant_id == tenant_id, UsageRecord.status == "open")
    )
    return count or 0


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
