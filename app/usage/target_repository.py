"""What the ledger says of versions that one alias led to. Each statement reads a bounded range
of the index `ix_usage_records_target`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import func, select, union_all
from sqlalchemy.ext.asyncio import AsyncSession

from app.usage.models import UsageRecord

STATUSES = ("open", "completed", "cancelled", "failed")
"""All of them, so that a range of the index is read for each."""


@dataclass(frozen=True, slots=True)
class AnsweredRequest:
    """One completed request. Times are milliseconds from its admission."""

    completion_tokens: int
    finish_reasons: list[str]
    ttft_ms: float | None
    total_ms: float | None


async def count_by_status(
    session: AsyncSession, version_ids: Sequence[str], alias: str, since: datetime
) -> dict[tuple[str, str], int]:
    """(version id, status) -> requests that began since then.

    By its parent: the versions were found by their tenant.
    """
    found = await session.execute(
        select(UsageRecord.version_id, UsageRecord.status, func.count())
        .where(*_range(version_ids, alias, since), UsageRecord.status.in_(STATUSES))
        .group_by(UsageRecord.version_id, UsageRecord.status)
    )
    return {(str(row[0]), row[1]): row[2] for row in found}


async def count_by_error(
    session: AsyncSession, version_ids: Sequence[str], alias: str, since: datetime
) -> dict[str, dict[str, int]]:
    """version id -> error code -> failed requests.

    By its parent: the versions were found by their tenant.
    """
    code = func.coalesce(UsageRecord.error_code, "unknown")
    found = await session.execute(
        select(UsageRecord.version_id, code, func.count())
        .where(*_range(version_ids, alias, since), UsageRecord.status == "failed")
        .group_by(UsageRecord.version_id, code)
    )
    counts: dict[str, dict[str, int]] = {}
    for version_id, error, requests in found:
        counts.setdefault(str(version_id), {})[error] = requests
    return counts


async def newest_answered(
    session: AsyncSession, version_ids: Sequence[str], alias: str, since: datetime, most: int
) -> dict[str, list[AnsweredRequest]]:
    """version id -> its newest completed requests, at most `most` of each.

    By its parent: the versions were found by their tenant.
    """
    if not version_ids:
        return {}
    parts = [
        select(*columns.c)
        for columns in (
            select(
                UsageRecord.version_id,
                UsageRecord.completion_tokens,
                UsageRecord.finish_reasons,
                UsageRecord.ttft_ms,
                UsageRecord.total_ms,
            )
            .where(*_range([version_id], alias, since), UsageRecord.status == "completed")
            .order_by(UsageRecord.started_at.desc())
            .limit(most)
            .subquery()
            for version_id in version_ids
        )
    ]
    answered: dict[str, list[AnsweredRequest]] = {version_id: [] for version_id in version_ids}
    for row in await session.execute(union_all(*parts)):
        answered[str(row[0])].append(AnsweredRequest(row[1], row[2] or [], row[3], row[4]))
    return answered


def _range(version_ids: Sequence[str], alias: str, since: datetime) -> tuple[Any, ...]:
    version = UsageRecord.version_id
    of_version = version == version_ids[0] if len(version_ids) == 1 else version.in_(version_ids)
    return (of_version, UsageRecord.alias == alias, UsageRecord.started_at >= since)
