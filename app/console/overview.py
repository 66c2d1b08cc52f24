"""The first page of a tenant: what came in, how fast it was answered, what went wrong."""

from datetime import timedelta
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response

from app.auth import SessionUser
from app.console.adapters import tenant_only
from app.console.render import render
from app.console.token_chart import tokens_chart
from app.deps import PlatformDep
from app.usage.latency import NEWEST, standing
from app.usage.report import report
from app.usage.spans import Bucket

router = APIRouter(prefix="/console/overview", include_in_schema=False)

Span = Literal["1h", "24h", "30d"]
SPANS: dict[Span, tuple[str, timedelta, Bucket]] = {
    "1h": ("the last hour", timedelta(hours=1), "minute"),
    "24h": ("the last 24 hours", timedelta(hours=24), "hour"),
    "30d": ("the last 30 days", timedelta(days=30), "day"),
}


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
