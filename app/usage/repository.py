"""The ledger's SQL. Months change in the transactions that open and close rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from sqlalchemy import ColumnElement, case, delete, func, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from app.usage.entries import FinalEntry, OpenEntry, hour_of, month_of
from app.usage.models import UsageDaily, UsageMonth, UsageRecord

GroupBy = Literal["key", "adapter", "model"]
HOURS_A_DAY = 24
DAILY_COLUMNS = (
    "tenant_id",
    "key_id",
    "adapter_id",
    "model",
    "requests",
    "cancelled",
    "failed",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
)


@dataclass(frozen=True, slots=True)
class Closed:
    """What a closing needs from the row that was open."""

    tenant_id: str
    key_id: str | None
    reserved_tokens: int
    started_at: datetime


@dataclass(frozen=True, slots=True)
class UsageSum:
    """Closed rows of one bucket and group. `bucket` is hours since the epoch of its beginning."""

    bucket: int
    group: str | None
    requests: int
    cancelled: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


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
) -> bool:
    """Reserves tokens of a month in one statement; False when they do not fit the limit."""
    if limit is not None and tokens > limit:
        return False
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
    taken = await session.execute(statement.returning(UsageMonth.owner_id))
    return taken.first() is not None


async def close_row(session: AsyncSession, entry: FinalEntry, closed_by: str) -> Closed | None:
    """Closes an open row; None when the request has none (any more)."""
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
        )
        .returning(
            UsageRecord.tenant_id,
            UsageRecord.key_id,
            UsageRecord.reserved_tokens,
            UsageRecord.started_at,
        )
        .execution_options(synchronize_session=False)
    )
    row = result.first()
    return None if row is None else Closed(row[0], row[1], row[2], row[3])


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
    await session.execute(
        update(UsageRecord)
        .where(UsageRecord.request_id.in_(request_ids), UsageRecord.status == "open")
        .values(lease_until=lease_until)
        .execution_options(synchronize_session=False)
    )


async def expired(
    session: AsyncSession, now: datetime, most: int, *, after: str = ""
) -> list[tuple[str, str, datetime]]:
    """(request id, engine, lease end) of open rows whose lease ended, in the order of the ids."""
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
    return await session.get(UsageRecord, request_id)


async def sums(
    session: AsyncSession,
    tenant_id: str,
    start: datetime,
    end: datetime,
    *,
    bucket_hours: int,
    group_by: GroupBy | None,
) -> list[UsageSum]:
    """The tenant's closed rows that began in [start, end), added up by bucket and group."""
    column = {
        None: None,
        "key": UsageRecord.key_id,
        "adapter": UsageRecord.adapter_id,
        "model": UsageRecord.model,
    }[group_by]
    bucket = UsageRecord.started_hour - UsageRecord.started_hour % bucket_hours
    keys: list[Any] = [bucket] if column is None else [bucket, column]
    found = await session.execute(
        select(*keys, *_figures())
        .where(
            UsageRecord.tenant_id == tenant_id,
            UsageRecord.started_at >= start,
            UsageRecord.started_at < end,
            UsageRecord.status != "open",
        )
        .group_by(*keys)
        .order_by(*keys)
    )
    totals = []
    for row in found:
        values = list(row)
        group = None if column is None else values.pop(1)
        totals.append(UsageSum(values[0], group, *(int(value) for value in values[1:])))
    return totals


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


async def days_closed_since(session: AsyncSession, since: datetime) -> list[int]:
    """Days (since the epoch) in which rows began that closed since then."""
    day = (UsageRecord.started_hour - UsageRecord.started_hour % HOURS_A_DAY) // HOURS_A_DAY
    found = await session.execute(
        select(day).where(UsageRecord.closed_at >= since).distinct().order_by(day)
    )
    return [int(row[0]) for row in found]


async def roll_up_day(session: AsyncSession, day: int) -> int:
    """Writes one day's sums anew from the ledger; returns the number of rows."""
    key = func.coalesce(UsageRecord.key_id, "")
    adapter = func.coalesce(UsageRecord.adapter_id, "")
    first = day * HOURS_A_DAY
    found = await session.execute(
        select(UsageRecord.tenant_id, key, adapter, UsageRecord.model, *_figures())
        .where(
            UsageRecord.started_hour >= first,
            UsageRecord.started_hour < first + HOURS_A_DAY,
            UsageRecord.status != "open",
        )
        .group_by(UsageRecord.tenant_id, key, adapter, UsageRecord.model)
    )
    rows = [{"day": day, **dict(zip(DAILY_COLUMNS, row, strict=True))} for row in found]
    await session.execute(delete(UsageDaily).where(UsageDaily.day == day))
    if rows:
        await session.execute(insert(UsageDaily), rows)
    return len(rows)


def _figures() -> tuple[Any, ...]:
    """requests, cancelled, failed, prompt, cached and completion tokens."""
    return (
        func.count(),
        func.coalesce(func.sum(case((UsageRecord.status == "cancelled", 1), else_=0)), 0),
        func.coalesce(func.sum(case((UsageRecord.status == "failed", 1), else_=0)), 0),
        func.coalesce(func.sum(UsageRecord.prompt_tokens), 0),
        func.coalesce(func.sum(UsageRecord.cached_tokens), 0),
        func.coalesce(func.sum(UsageRecord.completion_tokens), 0),
    )


def lease_end(now: datetime, lease_s: float) -> datetime:
    return now + timedelta(seconds=lease_s)
