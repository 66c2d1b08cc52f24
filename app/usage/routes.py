"""GET /v1/usage: the caller's tenant, added up from the ledger."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query, Response

from app.auth import ApiCaller
from app.deps import PlatformDep, ReadSession
from app.limits.service import Limits, limit_headers
from app.usage.report import report
from app.usage.repository import GroupBy
from app.usage.schemas import Bucket, UsageReport

router = APIRouter(prefix="/v1", tags=["usage"])


@router.get("/usage")
async def read_usage(
    caller: ApiCaller,
    platform: PlatformDep,
    session: ReadSession,
    response: Response,
    start: Annotated[datetime | None, Query(description="Default: 30 days ago")] = None,
    end: Annotated[datetime | None, Query(description="Default: now")] = None,
    bucket: Bucket = "day",
    group_by: GroupBy | None = None,
) -> UsageReport:
    """Requests that began in the span and have ended; times are UTC."""
    limits: Limits = platform.limits
    response.headers.update(limit_headers(await limits.peek(caller)))
    return await report(
        session,
        caller.tenant_id,
        now=platform.clock.now(),
        start=start,
        end=end,
        bucket=bucket,
        group_by=group_by,
    )
