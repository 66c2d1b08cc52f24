"""Sums of the ledger: what /v1/usage, the operator's page and the console show."""

import base64
import binascii
import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy.ext.asyncio import AsyncSession

from app.errors import InvalidRequest
from app.usage import sums_repository
from app.usage.schemas import UsageBucket, UsageReport
from app.usage.spans import EPOCH, Bucket, up_to_hour
from app.usage.sums_repository import GROUP_COLUMNS, GroupBy, Share, SumsQuery, UsageSum

LONGEST: dict[Bucket, timedelta] = {
    "minute": timedelta(hours=6),
    "hour": timedelta(days=31),
    "day": timedelta(days=366),
    "month": timedelta(days=5 * 366),
    "all": timedelta(days=5 * 366),
}
DEFAULT_SPAN: dict[Bucket, timedelta] = {
    "minute": timedelta(hours=1),
    "hour": timedelta(days=30),
    "day": timedelta(days=30),
    "month": timedelta(days=365),
    "all": timedelta(days=30),
}
SLACK = timedelta(days=1)
"""A whole number of days up to now may be asked for at any time of day."""
MAX_LINES = 1000
FIRST_YEAR, END_YEAR = 1980, 9000


async def report(
    session: AsyncSession,
    tenant_id: str | None,
    *,
    now: datetime,
    start: datetime | None = None,
    end: datetime | None = None,
    bucket: Bucket = "day",
    group_by: tuple[GroupBy, ...] | GroupBy | None = None,
    key_id: str | None = None,
    adapter_id: str | None = None,
    model: str | None = None,
    after: str | None = None,
    limit: int = MAX_LINES,
) -> UsageReport:
    """The last 30 days by default (by month: twelve months; by minute: the last hour).

    `tenant_id` None: of all tenants. Raises InvalidRequest for a span that is empty or too long,
    and for a cursor that is none.
    """
    groups = (group_by,) if isinstance(group_by, str) else group_by or ()
    start, end = span(now, start, end, bucket)
    query = SumsQuery(
        tenant_id=tenant_id,
        start=start,
        # nothing began after now: whole hours then need no look at the ledger
        end=up_to_hour(end) if end >= now else end,
        bucket=bucket,
        group_by=groups,
        key_id=key_id,
        adapter_id=adapter_id,
        model=model,
        after=None if after is None else _read_cursor(after, groups),
        limit=limit + 1,
    )
    sums = await sums_repository.sums(session, query)
    shown = sums[:limit]
    has_more = len(sums) > limit
    return UsageReport(
        start=start,
        end=end,
        bucket=bucket,
        group_by=list(groups),
        data=[_bucket(total, bucket, groups) for total in shown],
        has_more=has_more,
        next=_cursor(shown[-1]) if has_more else None,
    )


@dataclass(frozen=True, slots=True)
class UsageShare:
    """What one bucket or one group has of a tenant's usage. `group` "" is none; `start` is the
    bucket's, or that of the whole span."""

    start: datetime
    group: str
    requests: int
    failed: int
    prompt_tokens: int
    completion_tokens: int
    engine_ms: float


async def breakdown(
    session: AsyncSession,
    tenant_id: str,
    *,
    now: datetime,
    start: datetime,
    bucket: Bucket,
    group_by: GroupBy,
    most: int,
) -> tuple[list[UsageShare], list[UsageShare]]:
    """A tenant's usage up to now by bucket, and its `most` groups with the most tokens."""
    start, end = span(now, start, None, bucket)
    query = SumsQuery(
        tenant_id=tenant_id, start=start, end=up_to_hour(end), bucket=bucket, group_by=(group_by,)
    )
    by_bucket, groups = await sums_repository.breakdown(session, query, most)
    return (
        [_share(one, EPOCH + one.bucket * timedelta(hours=1)) for one in by_bucket],
        [_share(one, start) for one in groups],
    )


def _share(one: Share, start: datetime) -> UsageShare:
    return UsageShare(
        start=start,
        group=one.group,
        requests=one.requests,
        failed=one.failed,
        prompt_tokens=one.prompt_tokens,
        completion_tokens=one.completion_tokens,
        engine_ms=(one.prefill_us + one.decode_us) / 1000,
    )


def span(
    now: datetime, start: datetime | None, end: datetime | None, bucket: Bucket
) -> tuple[datetime, datetime]:
    """[start, end) in UTC; raises InvalidRequest when it is empty or longer than the bucket's."""
    end = _aware(end, "end") if end is not None else now + timedelta(seconds=1)
    if start is not None:
        start = _aware(start, "start")
    else:
        start = _beginning(end - DEFAULT_SPAN[bucket], bucket)
    if start >= end:
        raise InvalidRequest("start must lie before end", code="invalid_span", param="start")
    if end - start > LONGEST[bucket] + SLACK:
        raise InvalidRequest(
            f"a report by {bucket} covers at most {_words(LONGEST[bucket])}; ask for a shorter "
            "span or a longer bucket",
            code="invalid_span",
            param="start",
        )
    return start, end


def parse_group_by(values: list[str]) -> tuple[GroupBy, ...]:
    """`group_by=key,adapter` or the parameter repeated; each once. Raises InvalidRequest."""
    names = [name.strip() for value in values for name in value.split(",") if name.strip()]
    groups: list[GroupBy] = []
    for name in dict.fromkeys(names):
        known = next((group for group in GROUP_COLUMNS if group == name), None)
        if known is None:
            raise InvalidRequest(
                f"group_by has {name[:40]!r}; use any of {', '.join(GROUP_COLUMNS)}",
                code="invalid_value",
                param="group_by",
            )
        groups.append(known)
    return tuple(groups)


def _bucket(total: UsageSum, bucket: Bucket, groups: tuple[GroupBy, ...]) -> UsageBucket:
    unit = timedelta(minutes=1) if bucket == "minute" else timedelta(hours=1)
    values = [value or None for value in total.groups]
    named = {GROUP_COLUMNS[name]: value for name, value in zip(groups, values, strict=True)}
    return UsageBucket(
        start=EPOCH + total.bucket * unit,
        group=values[0] if len(values) == 1 else None,
        **named,
        requests=total.requests,
        cancelled=total.cancelled,
        failed=total.failed,
        prompt_tokens=total.prompt_tokens,
        cached_tokens=total.cached_tokens,
        completion_tokens=total.completion_tokens,
        total_tokens=total.prompt_tokens + total.completion_tokens,
        overshoot_tokens=total.overshoot_tokens,
        prefill_ms=total.prefill_us / 1000,
        decode_ms=total.decode_us / 1000,
        adapter_byte_seconds=total.adapter_byte_s,
    )


def _cursor(last: UsageSum) -> str:
    return base64.urlsafe_b64encode(json.dumps([last.bucket, *last.groups]).encode()).decode()


def _read_cursor(text: str, groups: tuple[GroupBy, ...]) -> tuple[int | str, ...]:
    try:
        bucket, *values = json.loads(base64.urlsafe_b64decode(text.encode()))
    except (binascii.Error, ValueError, TypeError, UnicodeError):
        values, bucket = [], None
    if (
        isinstance(bucket, bool)
        or not isinstance(bucket, int)
        or not 0 <= bucket < 2**31
        or len(values) != len(groups)
        or not all(isinstance(value, str) and "\0" not in value for value in values)
    ):
        raise InvalidRequest(
            "after must be the `next` of a page with the same group_by",
            code="invalid_cursor",
            param="after",
        )
    return (bucket, *values)


def _beginning(at: datetime, bucket: Bucket) -> datetime:
    """The bucket's own beginning, so that the first one of a report is whole."""
    at = at.replace(second=0, microsecond=0)
    if bucket == "minute":
        return at
    at = at.replace(minute=0)
    if bucket == "hour":
        return at
    return at.replace(hour=0, day=1 if bucket == "month" else at.day)


def _words(span: timedelta) -> str:
    return f"{span.days} days" if span.days else f"{span.seconds // 3600} hours"


def _aware(at: datetime, param: str) -> datetime:
    """A time without a zone is UTC."""
    if not FIRST_YEAR <= at.year < END_YEAR:
        raise InvalidRequest(
            f"{param} is in the year {at.year}; use a time like 2026-03-14T00:00:00Z",
            code="invalid_value",
            param=param,
        )
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
