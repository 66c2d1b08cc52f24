"""The ledger's writes: a group of rows a statement, inside `Database.write_in_thread`.

The statements are made once; only their parameters differ.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, bindparam, insert, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite

from app.usage.entries import FinalEntry, OpenEntry, hour_of, month_of
from app.usage.models import UsageDaily, UsageHourly, UsageMonth, UsageRecord
from app.usage.spans import HOURS_A_DAY
from app.usage.sums_repository import FIGURES, KEYS

_rows: Any = UsageRecord.__table__
_months: Any = UsageMonth.__table__


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


# --------------------------------------------------------------------------- opening


_INSERT_OPEN = insert(_rows)


def insert_open(
    connection: Connection, entries: Sequence[OpenEntry], at: datetime, lease_until: datetime
) -> None:
    """Raises IntegrityError when one of the request ids already has a row."""
    connection.execute(
        _INSERT_OPEN,
        [
            {
                "request_id": entry.request_id,
                "tenant_id": entry.tenant_id,
                "key_id": entry.key_id,
                "user_id": entry.user_id,
                "adapter_id": entry.adapter_id,
                "version_id": entry.version_id,
                "alias": entry.alias,
                "model": entry.model,
                "endpoint": entry.endpoint,
                "streamed": entry.streamed,
                "engine": entry.engine,
                "status": "open",
                "reserved_tokens": entry.reserved_tokens,
                "prompt_tokens": 0,
                "cached_tokens": 0,
                "completion_tokens": 0,
                "overshoot_tokens": 0,
                "started_at": at,
                "started_hour": hour_of(at),
                "lease_until": lease_until,
            }
            for entry in entries
        ],
    )


def reserve_month(
    connection: Connection, owner_id: str, month: str, amounts: Sequence[int], limit: int | None
) -> list[int | None]:
    """Reserves tokens of a month for calls in their order: what is billed and reserved then.

    None for those that do not fit the limit beside the ones before them.
    """
    total = sum(amounts)
    used = _reserve(connection, owner_id, month, total, limit)
    fitting: list[int] = list(amounts)
    if used is None:
        assert limit is not None
        left = limit - sum(month_used(connection, owner_id, month))
        fitting = []
        for tokens in amounts:
            fitting.append(tokens if tokens <= left else -1)
            left -= max(0, fitting[-1])
        total = sum(tokens for tokens in fitting if tokens >= 0)
        used = _reserve(connection, owner_id, month, total, limit) if total else None
        if used is None:
            return [None] * len(amounts)
    used -= total
    standing: list[int | None] = []
    for tokens in fitting:
        used += max(0, tokens)
        standing.append(used if tokens >= 0 else None)
    return standing


def _reserve(
    connection: Connection, owner_id: str, month: str, tokens: int, limit: int | None
) -> int | None:
    """In one statement, which on PostgreSQL locks the row also where the tokens do not fit."""
    if limit is not None and tokens > limit:
        return None
    row = {"owner_id": owner_id, "month": month, "tokens": 0, "reserved": tokens, "most": limit}
    total: int | None = connection.execute(_reserving(connection.dialect.name), row).scalar()
    return total


@lru_cache(maxsize=2)
def _reserving(dialect: str) -> Any:
    table, most = _months, bindparam("most", type_=_months.c.tokens.type)
    statement = _insert_of(dialect, table).values(
        {name: bindparam(name) for name in ("owner_id", "month", "tokens", "reserved")}
    )
    after = table.c.tokens + table.c.reserved + statement.excluded.reserved
    return statement.on_conflict_do_update(
        index_elements=["owner_id", "month"],
        set_={"reserved": table.c.reserved + statement.excluded.reserved},
        where=or_(most.is_(None), after <= most),
    ).returning(table.c.tokens + table.c.reserved)


_MONTH_USED = select(_months.c.tokens, _months.c.reserved).where(
    _months.c.owner_id == bindparam("owner_id"), _months.c.month == bindparam("month")
)


def month_used(connection: Connection, owner_id: str, month: str) -> tuple[int, int]:
    """(billed tokens, reserved tokens) of one owner in one month."""
    row = connection.execute(_MONTH_USED, {"owner_id": owner_id, "month": month}).first()
    return (0, 0) if row is None else (row[0], row[1])


# --------------------------------------------------------------------------- closing

_OPEN = (
    select(
        _rows.c.request_id,
        _rows.c.tenant_id,
        _rows.c.key_id,
        _rows.c.adapter_id,
        _rows.c.model,
        _rows.c.reserved_tokens,
        _rows.c.started_at,
        _rows.c.started_hour,
    )
    .where(_rows.c.request_id.in_(bindparam("ids", expanding=True)), _rows.c.status == "open")
    .order_by(_rows.c.request_id)
    .with_for_update()
)
_FINAL = (
    "status",
    "error_code",
    "finish_reasons",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "overshoot_tokens",
    "closed_at",
    "queue_ms",
    "adapter_wait_ms",
    "ttft_ms",
    "total_ms",
    "prefill_us",
    "decode_us",
    "adapter_byte_s",
)
"""What a final entry says of its row, by the names of both."""
_CLOSE = (
    update(_rows)
    .where(_rows.c.request_id == bindparam("id"))
    .values({name: bindparam(f"new_{name}") for name in (*_FINAL, "closed_by")})
)
_SETTLE = (
    update(_months)
    .where(_months.c.owner_id == bindparam("owner"), _months.c.month == bindparam("of"))
    .values(
        tokens=_months.c.tokens + bindparam("billed"),
        reserved=_months.c.reserved - bindparam("released"),
    )
)


def close_rows(
    connection: Connection, entries: Iterable[FinalEntry], closed_by: str
) -> list[tuple[Closed, FinalEntry]]:
    """Closes those rows that are open, the first entry of each; returns them.

    They are locked in the order of their ids, and stay open to nobody else until the transaction
    ends. Of any tenant: the row says whose it is.
    """
    finals: dict[str, FinalEntry] = {}
    for entry in entries:
        finals.setdefault(entry.request_id, entry)
    found = connection.execute(_OPEN, {"ids": list(finals)}).all()
    closed = [(Closed(*row[1:]), finals[row[0]]) for row in found]
    if closed:
        connection.execute(_CLOSE, [_closing(entry, closed_by) for _, entry in closed])
    return closed


def _closing(entry: FinalEntry, closed_by: str) -> dict[str, Any]:
    values = {f"new_{name}": getattr(entry, name) for name in _FINAL}
    return values | {"id": entry.request_id, "new_closed_by": closed_by}


def settle_months(connection: Connection, closed: Iterable[tuple[Closed, FinalEntry]]) -> None:
    """Turns reservations into billed tokens, one update an owner, always in the same order."""
    changes: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for row, entry in closed:
        for owner in filter(None, (row.key_id, row.tenant_id)):
            change = changes[(owner, month_of(row.started_at))]
            change[0] += entry.billed_tokens
            change[1] += row.reserved_tokens
    _settle(connection, changes)


def release_months(connection: Connection, month: str, tokens: Mapping[str, int]) -> None:
    """Gives back what was reserved for calls that are refused after all, by owner."""
    _settle(connection, {(owner, month): (0, reserved) for owner, reserved in tokens.items()})


def _settle(connection: Connection, changes: Mapping[tuple[str, str], Sequence[int]]) -> None:
    rows = [
        {"owner": owner, "of": month, "billed": billed, "released": released}
        for (owner, month), (billed, released) in sorted(changes.items())
    ]
    if rows:
        connection.execute(_SETTLE, rows)


def add_closed(connection: Connection, closed: Iterable[tuple[Closed, FinalEntry]]) -> None:
    """Adds rows to the sums of their hour and day, in the transaction that closes them."""
    hourly: defaultdict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0] * len(FIGURES))
    daily: defaultdict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0] * len(FIGURES))
    for row, entry in closed:
        keys = (row.tenant_id, row.key_id or "", row.adapter_id or "", row.model)
        figures = (
            1,
            int(entry.status == "cancelled"),
            int(entry.status == "failed"),
            *(getattr(entry, name) for name in FIGURES[3:]),
        )
        for total in (
            hourly[(row.started_hour, *keys)],
            daily[(row.started_hour // HOURS_A_DAY, *keys)],
        ):
            total[:] = map(sum, zip(total, figures, strict=True))
    # always in the same order, so that processes which close at once wait instead of deadlocking
    _add(connection, UsageHourly.__table__, "hour", hourly)
    _add(connection, UsageDaily.__table__, "day", daily)


def _add(
    connection: Connection,
    table: Any,
    bucket: str,
    sums: Mapping[tuple[Any, ...], Sequence[int]],
) -> None:
    names = (bucket, *KEYS, *FIGURES)
    rows = [dict(zip(names, (*keys, *sums[keys]), strict=True)) for keys in sorted(sums)]
    if rows:
        connection.execute(_adding(connection.dialect.name, table, bucket), rows)


@lru_cache(maxsize=4)
def _adding(dialect: str, table: Any, bucket: str) -> Any:
    statement = _insert_of(dialect, table)
    added = {name: table.c[name] + statement.excluded[name] for name in FIGURES}
    return statement.on_conflict_do_update(index_elements=[bucket, *KEYS], set_=added)


def _insert_of(dialect: str, table: Any) -> Any:
    module: Any = postgresql if dialect == "postgresql" else sqlite
    return module.insert(table)
