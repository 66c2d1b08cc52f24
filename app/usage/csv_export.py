"""CSV of reports and of single requests, page by page, so that no export is held in memory.

Times are ISO 8601 in UTC. A text that a spreadsheet would run as a formula gets an apostrophe in
front: names of models are the tenants' own words.
"""

import csv
import io
from collections.abc import AsyncIterator, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from app.db import Database
from app.usage import repository
from app.usage.report import MAX_LINES, report
from app.usage.repository import EXPORTED

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
REPORT_COLUMNS = (
    "requests",
    "cancelled",
    "failed",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "total_tokens",
    "overshoot_tokens",
    "prefill_ms",
    "decode_ms",
    "adapter_byte_seconds",
)
PAGE = 2000


def cell(value: object) -> object:
    """One value as it is written."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if isinstance(value, list):
        value = " ".join(map(str, value))
    if isinstance(value, str) and value.startswith(FORMULA):
        return "'" + value
    return "" if value is None else value


def lines(rows: Iterable[Sequence[object]]) -> bytes:
    """Rows as CSV (RFC 4180: commas, CRLF)."""
    text = io.StringIO()
    csv.writer(text).writerows([cell(value) for value in row] for row in rows)
    return text.getvalue().encode()


async def report_csv(
    db: Database, tenant_id: str | None, *, now: datetime, options: dict[str, Any]
) -> AsyncIterator[bytes]:
    """The whole report. Refusals are raised before the first byte."""
    groups = [f"{name}_id" if name != "model" else name for name in options["group_by"]]
    yield lines([["start", *groups, *REPORT_COLUMNS]])
    after: str | None = None
    while True:
        async with db.reading() as session:
            page = await report(
                session, tenant_id, now=now, after=after, limit=MAX_LINES, **options
            )
        if page.data:
            names = ("start", *groups, *REPORT_COLUMNS)
            yield lines([getattr(entry, name) for name in names] for entry in page.data)
        after = page.next
        if after is None:
            return


async def requests_csv(
    db: Database, tenant_id: str | None, start: datetime, end: datetime, filters: dict[str, Any]
) -> AsyncIterator[bytes]:
    """One line a closed request of [start, end), in the order in which they began."""
    yield lines([EXPORTED])
    after: tuple[datetime, str] | None = None
    while True:
        async with db.reading() as session:
            page = await repository.closed_between(
                session, tenant_id, start, end, after=after, most=PAGE, **filters
            )
        if page:
            yield lines(page)
        if len(page) < PAGE:
            return
        after = (page[-1][EXPORTED.index("started_at")], page[-1][EXPORTED.index("request_id")])
