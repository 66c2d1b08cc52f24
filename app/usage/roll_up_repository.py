"""Compares the sums by hour and day with the ledger, and writes them anew from it."""

from typing import Any

from sqlalchemy import case, delete, func, insert, literal, or_, select, text, union_all
from sqlalchemy.ext.asyncio import AsyncSession

from app.usage.models import UsageDaily, UsageHourly, UsageRecord
from app.usage.spans import HOURS_A_DAY
from app.usage.sums_repository import FIGURES, KEYS, ledger_figures, ledger_keys


async def differing_days(session: AsyncSession, first_day: int, end_day: int) -> list[int]:
    """Days (since the epoch) of [first, end) whose hours or whose day differ from the ledger.

    One statement, so that it sees one state of the database while rows go on closing.

    Of any tenant: for the proof that sums equal the ledger.
    """
    first, end = first_day * HOURS_A_DAY, end_day * HOURS_A_DAY
    hour = UsageRecord.started_hour
    sources = union_all(
        select(
            (hour // HOURS_A_DAY).label("day"),
            UsageRecord.tenant_id.label("tenant_id"),
            literal("ledger").label("source"),
            *ledger_figures(),
        ).where(hour >= first, hour < end, UsageRecord.status != "open"),
        _kept(UsageHourly, UsageHourly.hour // HOURS_A_DAY, "hourly").where(
            UsageHourly.hour >= first, UsageHourly.hour < end
        ),
        _kept(UsageDaily, UsageDaily.day, "daily").where(
            UsageDaily.day >= first_day, UsageDaily.day < end_day
        ),
    ).subquery()

    def total(source: str, figure: str) -> Any:
        return func.sum(case((sources.c.source == source, sources.c[figure]), else_=0))

    differ = or_(
        *(
            total("ledger", figure) != total(kept, figure)
            for figure in FIGURES
            for kept in ("hourly", "daily")
        )
    )
    grouped = (
        select(sources.c.day).group_by(sources.c.day, sources.c.tenant_id).having(differ)
    ).subquery()
    found = await session.execute(select(grouped.c.day).distinct().order_by(grouped.c.day))
    return [int(row[0]) for row in found]


async def rewrite_day(session: AsyncSession, day: int) -> None:
    """Replaces one day's sums by those of the ledger.

    Closers on PostgreSQL wait for this transaction before they add to the sums; those that have
    added are waited for. SQLite has one writer at a time.
    """
    if session.get_bind().dialect.name == "postgresql":
        await session.execute(
            text("LOCK TABLE usage_hourly, usage_daily IN SHARE ROW EXCLUSIVE MODE")
        )
    first = day * HOURS_A_DAY
    hour = UsageRecord.started_hour
    await session.execute(
        delete(UsageHourly).where(UsageHourly.hour >= first, UsageHourly.hour < first + HOURS_A_DAY)
    )
    await session.execute(delete(UsageDaily).where(UsageDaily.day == day))
    for table, name, bucket in (
        (UsageHourly, "hour", hour),
        (UsageDaily, "day", hour // HOURS_A_DAY),
    ):
        lines = (
            select(bucket.label("bucket"), *ledger_keys(), *ledger_figures())
            .where(hour >= first, hour < first + HOURS_A_DAY, UsageRecord.status != "open")
            .subquery()
        )
        keys = [lines.c.bucket, *(lines.c[key] for key in KEYS)]
        sums = select(*keys, *(func.sum(lines.c[figure]) for figure in FIGURES)).group_by(*keys)
        await session.execute(insert(table).from_select([name, *KEYS, *FIGURES], sums))


def _kept(table: Any, day: Any, source: str) -> Any:
    return select(
        day.label("day"),
        table.tenant_id.label("tenant_id"),
        literal(source).label("source"),
        *(getattr(table, name) for name in FIGURES),
    )
