"""What closed rows add up to: kept by hour and day as rows close, read back in one statement."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Integer,
    Select,
    case,
    cast,
    extract,
    func,
    literal,
    select,
    tuple_,
    union_all,
)
from sqlalchemy.ext.asyncio import AsyncSession

from app.usage.models import UsageDaily, UsageHourly, UsageRecord
from app.usage.spans import HOURS_A_DAY, Bucket, Piece, hour_number, month_starts, pieces

GroupBy = Literal["tenant", "key", "adapter", "model"]
GROUP_COLUMNS: dict[GroupBy, str] = {
    "tenant": "tenant_id",
    "key": "key_id",
    "adapter": "adapter_id",
    "model": "model",
}
KEYS = ("tenant_id", "key_id", "adapter_id", "model")
FIGURES = (
    "requests",
    "cancelled",
    "failed",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "overshoot_tokens",
    "prefill_us",
    "decode_us",
    "adapter_byte_s",
)


SHARED = ("requests", "failed", "prompt_tokens", "completion_tokens", "prefill_us", "decode_us")


@dataclass(frozen=True, slots=True)
class Share:
    """The figures of SHARED for one bucket (hours since the epoch), or for one group of the whole
    span, which has no bucket (-1)."""

    bucket: int
    group: str
    requests: int
    failed: int
    prompt_tokens: int
    completion_tokens: int
    prefill_us: int
    decode_us: int

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class SumsQuery:
    """`tenant_id` None: all tenants (operators alone). `after`: the last line of the page before,
    its bucket and then its groups in the order of `group_by`."""

    tenant_id: str | None
    start: datetime
    end: datetime
    bucket: Bucket
    group_by: tuple[GroupBy, ...] = ()
    key_id: str | None = None
    adapter_id: str | None = None
    model: str | None = None
    after: tuple[int | str, ...] | None = None
    limit: int = 1000


@dataclass(frozen=True, slots=True)
class UsageSum:
    """One line of a report. `bucket`: minutes (by minute) or hours since the epoch.

    `groups` follows the query's `group_by`; "" stands for none.
    """

    bucket: int
    groups: tuple[str, ...]
    requests: int
    cancelled: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    overshoot_tokens: int
    prefill_us: int
    decode_us: int
    adapter_byte_s: int


# --------------------------------------------------------------------------- reports


async def sums(session: AsyncSession, query: SumsQuery) -> list[UsageSum]:
    """Closed rows that began in the span, added up by bucket and groups: one statement."""
    source = _lines(query)
    if source is None:
        return []
    lines = source.subquery()
    keys = [lines.c.bucket, *(lines.c[GROUP_COLUMNS[name]] for name in query.group_by)]
    statement = (
        select(*keys, *(func.sum(lines.c[name]) for name in FIGURES))
        .group_by(*keys)
        .order_by(*keys)
        .limit(query.limit)
    )
    if query.after is not None:
        statement = statement.where(tuple_(*keys) > tuple_(*map(literal, query.after)))
    found = await session.execute(statement)
    groups = len(keys)
    return [
        UsageSum(int(row[0]), tuple(row[1:groups]), *(int(value) for value in row[groups:]))
        for row in found
    ]


async def breakdown(
    session: AsyncSession, query: SumsQuery, most: int
) -> tuple[list[Share], list[Share]]:
    """The same rows by bucket, and the `most` groups with the most tokens, those first.

    One statement. `query.group_by` has one name.
    """
    (name,) = query.group_by
    over_time = _lines(replace(query, group_by=()), SHARED)
    grouped = _lines(replace(query, bucket="all"), SHARED)
    if over_time is None or grouped is None:
        return [], []
    times, groups = over_time.subquery(), grouped.subquery()
    column = groups.c[GROUP_COLUMNS[name]]
    tokens = func.sum(groups.c.prompt_tokens + groups.c.completion_tokens)
    by_bucket = select(
        times.c.bucket,
        literal("").label("name"),
        *(func.sum(times.c[figure]).label(figure) for figure in SHARED),
    ).group_by(times.c.bucket)
    largest = (
        select(
            literal(-1).label("bucket"),
            column.label("name"),
            *(func.sum(groups.c[figure]).label(figure) for figure in SHARED),
        )
        .group_by(column)
        .order_by(tokens.desc(), column)
        .limit(most)
        .subquery()
    )
    found = [
        Share(int(row[0]), row[1], *(int(value) for value in row[2:]))
        for row in await session.execute(union_all(by_bucket, select(largest)))
    ]
    return (
        sorted((one for one in found if one.bucket >= 0), key=lambda one: one.bucket),
        sorted((one for one in found if one.bucket < 0), key=lambda one: (-one.tokens, one.group)),
    )


def _lines(query: SumsQuery, figures: Sequence[str] = FIGURES) -> CompoundSelect[Any] | None:
    """Lines of the span with their bucket, groups and figures, to be added up; None for no span."""
    parts = [_part(query, piece) for piece in pieces(query.start, query.end, query.bucket)]
    return union_all(*(_piece(query, part, figures) for part in parts)) if parts else None


def _piece(query: SumsQuery, part: Select[Any], figures: Sequence[str]) -> Select[Any]:
    """With buckets that say little beside the groups, added up by itself: few lines are left."""
    source = part.subquery()
    bucket = _bucket(query, source.c.at).label("bucket")
    groups = [source.c[GROUP_COLUMNS[name]] for name in query.group_by]
    if query.bucket in ("month", "all") and groups:
        summed = (func.sum(source.c[figure]).label(figure) for figure in figures)
        keys = groups if query.bucket == "all" else ["bucket", *groups]
        return select(bucket, *groups, *summed).group_by(*keys)
    return select(bucket, *groups, *(source.c[figure] for figure in figures))


def _bucket(query: SumsQuery, at: ColumnElement[int]) -> ColumnElement[int]:
    """The bucket that a line's hour (or minute) belongs to."""
    if query.bucket == "all":
        return literal(hour_number(query.start))
    if query.bucket == "day":
        return at - at % HOURS_A_DAY
    if query.bucket == "month":
        starts = [hour_number(first) for first in month_starts(query.start, query.end)]
        # the newest first: most rows are of the last months
        return case(*((at >= start, start) for start in reversed(starts)), else_=starts[0])
    return at


def _part(query: SumsQuery, piece: Piece) -> Select[Any]:
    """The lines of one piece: at, tenant, key, adapter, model and the figures.

    Without groups they are added up by hour or day, in the order in which their table has them.
    """
    if piece.source == "ledger":
        return _from_ledger(query, piece)
    table: Any
    if piece.source == "daily":
        table, bucket, (first, end) = UsageDaily, UsageDaily.day, piece.days
        at: Any = bucket * HOURS_A_DAY
    else:
        table, bucket, (first, end) = UsageHourly, UsageHourly.hour, piece.hours
        at = bucket
    figures = [getattr(table, name) for name in FIGURES]
    where = (
        bucket >= first,
        bucket < end,
        *_filters(query, table.tenant_id, table.key_id, table.adapter_id, table.model),
    )
    if not query.group_by:
        return select(at.label("at"), *map(_summed, figures)).where(*where).group_by(bucket)
    keys = (getattr(table, name) for name in KEYS)
    return select(at.label("at"), *keys, *figures).where(*where)


def _from_ledger(query: SumsQuery, piece: Piece) -> Select[Any]:
    first, end = piece.hours
    at: Any = UsageRecord.started_hour
    if query.bucket == "minute":
        at = cast(func.floor(extract("epoch", UsageRecord.started_at) / 60), Integer)
    rows = UsageRecord
    where = (
        rows.started_hour >= first,
        rows.started_hour < end,
        rows.started_at >= piece.start,
        rows.started_at < piece.end,
        rows.status != "open",
        *_filters(query, rows.tenant_id, rows.key_id, rows.adapter_id, rows.model),
    )
    if not query.group_by and query.bucket != "minute":
        summed = map(_summed, ledger_figures())
        return select(at.label("at"), *summed).where(*where).group_by(at)
    return select(at.label("at"), *ledger_keys(), *ledger_figures()).where(*where)


def _summed(figure: Any) -> Any:
    return func.sum(figure).label(figure.key)


def _filters(query: SumsQuery, tenant: Any, key: Any, adapter: Any, model: Any) -> list[Any]:
    wanted = (
        (tenant, query.tenant_id),
        (key, query.key_id),
        (adapter, query.adapter_id),
        (model, query.model),
    )
    return [column == value for column, value in wanted if value is not None]


def ledger_keys() -> list[Any]:
    """Whose a row is, in the order of KEYS; the sums have no NULL in their keys."""
    rows = UsageRecord
    return [
        rows.tenant_id.label("tenant_id"),
        func.coalesce(rows.key_id, "").label("key_id"),
        func.coalesce(rows.adapter_id, "").label("adapter_id"),
        rows.model.label("model"),
    ]


def ledger_figures() -> list[Any]:
    """The figures of one row, in the order of FIGURES."""
    rows = UsageRecord
    return [
        literal(1).label("requests"),
        case((rows.status == "cancelled", 1), else_=0).label("cancelled"),
        case((rows.status == "failed", 1), else_=0).label("failed"),
        *(getattr(rows, name).label(name) for name in FIGURES[3:]),
    ]
