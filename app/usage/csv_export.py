"""CSV of reports and of single requests, page by page, so that no export is held in memory."""

from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

from app.csv_text import lines
from app.db import Database
from app.usage import repository
from app.usage.report import MAX_LINES, report
from app.usage.repository import EXPORTED

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
