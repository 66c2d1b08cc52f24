"""Sums of the ledger for a tenant: what /v1/usage and the console show."""

from datetime import UTC, datetime, timedelta

from sqlalchemy.ext.asyncio import AsyncSession

from app.errors import InvalidRequest
from app.usage import repository
from app.usage.repository import GroupBy, UsageSum
from app.usage.schemas import Bucket, UsageBucket, UsageReport

BUCKET_HOURS: dict[Bucket, int] = {"day": 24, "hour": 1}
LONGEST = {"day": timedelta(days=366), "hour": timedelta(days=31)}
DEFAULT_SPAN = timedelta(days=30)


async def report(
    session: AsyncSession,
    tenant_id: str,
    *,
    now: datetime,
    start: datetime | None = None,
    end: datetime | None = None,
    bucket: Bucket = "day",
    group_by: GroupBy | None = None,
) -> UsageReport:
    """The last 30 days by default. Raises InvalidRequest for a span that is empty or too long."""
    end = _aware(end) if end is not None else now + timedelta(seconds=1)
    if start is not None:
        start = _aware(start)
    else:
        start = (end - DEFAULT_SPAN).replace(hour=0, minute=0, second=0, microsecond=0)
    if start >= end:
        raise InvalidRequest("start must lie before end", code="invalid_span", param="start")
    if end - start > LONGEST[bucket] + timedelta(days=1):
        raise InvalidRequest(
            f"a report by {bucket} covers at most {LONGEST[bucket].days} days; ask for a shorter "
            "span",
            code="invalid_span",
            param="start",
        )
    sums = await repository.sums(
        session,
        tenant_id,
        start,
        end,
        bucket_hours=BUCKET_HOURS[bucket],
        group_by=group_by,
    )
    return UsageReport(
        start=start,
        end=end,
        bucket=bucket,
        group_by=group_by,
        data=[_bucket(total) for total in sums],
    )


def _bucket(total: UsageSum) -> UsageBucket:
    return UsageBucket(
        start=datetime.fromtimestamp(total.bucket * 3600, UTC),
        group=total.group,
        requests=total.requests,
        cancelled=total.cancelled,
        failed=total.failed,
        prompt_tokens=total.prompt_tokens,
        cached_tokens=total.cached_tokens,
        completion_tokens=total.completion_tokens,
        total_tokens=total.prompt_tokens + total.completion_tokens,
    )


def _aware(at: datetime) -> datetime:
    """A time without a zone is UTC."""
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
