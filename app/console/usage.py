"""Usage by key, adapter or model: a chart, a table and CSV, all from the same report."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters.listing import adapter_names
from app.auth import SessionUser
from app.caller import Caller
from app.console.adapters import tenant_only
from app.console.render import render
from app.console.token_chart import tokens_chart
from app.deps import PlatformDep
from app.keys import service as keys
from app.usage.csv_export import report_csv
from app.usage.report import MAX_LINES, UsageShare, breakdown
from app.usage.spans import Bucket

router = APIRouter(prefix="/console/usage", include_in_schema=False)

Span = Literal["24h", "30d", "12m"]
By = Literal["adapter", "key", "model"]
SPANS: dict[Span, tuple[str, timedelta, Bucket]] = {
    "24h": ("the last 24 hours", timedelta(hours=24), "hour"),
    "30d": ("the last 30 days", timedelta(days=30), "day"),
    "12m": ("the last twelve months", timedelta(days=365), "month"),
}
GROUPS: dict[By, str] = {"adapter": "Adapter", "key": "Key", "model": "Model"}
MOST_LINES = 50
"""Of the table, the most tokens first; the rest is one line, and the export has them all."""
NONE = {"adapter": "the base model", "key": "the console's playground", "model": "no model"}
SpanQuery = Annotated[Span, Query()]
ByQuery = Annotated[By, Query()]


@dataclass(slots=True)
class Line:
    """One key, adapter or model over the whole span."""

    name: str
    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    engine_ms: float = 0.0

    def add(self, row: UsageShare) -> None:
        self.requests += row.requests
        self.failed += row.failed
        self.prompt_tokens += row.prompt_tokens
        self.completion_tokens += row.completion_tokens
        self.engine_ms += row.engine_ms

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@router.get("")
async def usage_page(
    request: Request,
    caller: SessionUser,
    platform: PlatformDep,
    span: SpanQuery = "30d",
    by: ByQuery = "adapter",
) -> Response:
    tenant_only(caller)
    title, length, bucket = SPANS[span]
    now = platform.clock.now()
    start = now - length
    async with platform.db.reading() as session:
        over_time, largest = await breakdown(
            session,
            caller.tenant_id,
            now=now,
            start=start,
            bucket=bucket,
            group_by=by,
            most=MOST_LINES,
        )
        names = await _names(session, caller, by, largest)
    lines, total = _lines(largest, by, names), _total(over_time)
    return render(
        request,
        "usage.html",
        span=span,
        spans=SPANS,
        span_title=title,
        by=by,
        groups=GROUPS,
        lines=lines,
        rest=_rest(total, lines),
        total=total,
        chart=tokens_chart(over_time, start, now, bucket),
    )


@router.get("/export.csv")
async def export(
    caller: SessionUser, platform: PlatformDep, span: SpanQuery = "30d", by: ByQuery = "adapter"
) -> Response:
    """The page's figures, a line a bucket and group."""
    tenant_only(caller)
    _, length, bucket = SPANS[span]
    now = platform.clock.now()
    options = {"start": now - length, "end": None, "bucket": bucket, "group_by": (by,)}
    filters = dict.fromkeys(("key_id", "adapter_id", "model"))
    return StreamingResponse(
        report_csv(platform.db, caller.tenant_id, now=now, options=options | filters),
        media_type="text/csv; charset=utf-8",
        headers={"Content-Disposition": f'attachment; filename="usage-{by}-{span}.csv"'},
    )


async def _names(
    session: AsyncSession, caller: Caller, by: By, rows: list[UsageShare]
) -> dict[str, str]:
    """What people call the ids that the ledger keeps."""
    if by == "key":
        known = await keys.list_keys(session, tenant_id=caller.tenant_id, limit=MAX_LINES)
        return {key.id: key.name or f"lmx_{key.public_id}" for key in known}
    if by == "adapter":
        return await adapter_names(session, caller, [row.group for row in rows if row.group])
    return {}


def _lines(rows: list[UsageShare], by: By, names: dict[str, str]) -> list[Line]:
    """The most tokens first."""
    lines = []
    for row in rows:
        line = Line(names.get(row.group, row.group) or NONE[by])
        line.add(row)
        lines.append(line)
    return sorted(lines, key=lambda line: -line.tokens)


def _rest(total: Line, lines: list[Line]) -> Line | None:
    """What is not among the lines; None where they are all."""
    rest = Line("All others")
    for name in ("requests", "failed", "prompt_tokens", "completion_tokens"):
        setattr(rest, name, getattr(total, name) - sum(getattr(line, name) for line in lines))
    rest.engine_ms = max(0.0, total.engine_ms - sum(line.engine_ms for line in lines))
    return rest if rest.requests else None


def _total(rows: list[UsageShare]) -> Line:
    total = Line("All")
    for row in rows:
        total.add(row)
    return total
