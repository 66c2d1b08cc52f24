"""The first page of a tenant: what came in, how fast it was answered, what went wrong."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response

from app.auth import SessionUser
from app.console.adapters import tenant_only
from app.console.charts import Chart, bar_chart
from app.console.render import render
from app.deps import PlatformDep
from app.usage.latency import NEWEST, standing
from app.usage.report import report
from app.usage.schemas import UsageBucket
from app.usage.spans import EPOCH, Bucket, month_starts

router = APIRouter(prefix="/console/overview", include_in_schema=False)

Span = Literal["1h", "24h", "30d"]
SPANS: dict[Span, tuple[str, timedelta, Bucket]] = {
    "1h": ("the last hour", timedelta(hours=1), "minute"),
    "24h": ("the last 24 hours", timedelta(hours=24), "hour"),
    "30d": ("the last 30 days", timedelta(days=30), "day"),
}
STEPS = {
    "minute": (timedelta(minutes=1), "%H:%M UTC"),
    "hour": (timedelta(hours=1), "%b %d %H:00 UTC"),
    "day": (timedelta(days=1), "%b %d"),
}


def _starts(start: datetime, end: datetime, bucket: Bucket) -> Iterator[tuple[datetime, str]]:
    """Beginning and label of every bucket of the span."""
    if bucket == "month":
        yield from ((at, at.strftime("%b %Y")) for at in month_starts(start, end))
        return
    step, form = STEPS[bucket]
    at = EPOCH + (start - EPOCH) // step * step
    while at <= end:
        yield at, at.strftime(form)
        at += step


@router.get("")
async def overview_page(
    request: Request,
    caller: SessionUser,
    platform: PlatformDep,
    span: Annotated[Span, Query()] = "24h",
) -> Response:
    tenant_only(caller)
    title, length, bucket = SPANS[span]
    now = platform.clock.now()
    start = now - length
    async with platform.db.reading() as session:
        usage = await report(session, caller.tenant_id, now=now, start=start, bucket=bucket)
        went = await standing(
            session,
            caller.tenant_id,
            start=start,
            ttft_budget_ms=caller.limits.ttft_ms,
            tpot_budget_ms=caller.limits.tpot_ms,
        )
    return render(
        request,
        "overview.html",
        span=span,
        spans=SPANS,
        span_title=title,
        went=went,
        newest=NEWEST,
        limits=caller.limits,
        chart=tokens_chart(usage.data, start, now, bucket),
        requests=sum(row.requests for row in usage.data),
        prompt_tokens=sum(row.prompt_tokens for row in usage.data),
        cached_tokens=sum(row.cached_tokens for row in usage.data),
        completion_tokens=sum(row.completion_tokens for row in usage.data),
    )


def tokens_chart(rows: list[UsageBucket], start: datetime, end: datetime, bucket: Bucket) -> Chart:
    """Prompt and answer tokens of every bucket of the span, also of those without any."""
    sums: dict[datetime, tuple[int, int]] = {}
    for row in rows:
        prompt, answer = sums.get(row.start, (0, 0))
        sums[row.start] = (prompt + row.prompt_tokens, answer + row.completion_tokens)
    columns = []
    for at, label in _starts(start, end, bucket):
        prompt, answer = sums.get(at, (0, 0))
        columns.append((label, (("prompt", float(prompt)), ("answer", float(answer)))))
    return bar_chart(columns, unit=" tokens")
