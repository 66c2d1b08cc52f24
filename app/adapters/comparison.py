"""A canary's targets side by side, from the ledger: three statements however many targets."""

from datetime import datetime, timedelta

from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters import alias_repository, repository
from app.adapters.alias_service import find_alias
from app.adapters.aliases import MAX_TARGETS
from app.adapters.comparison_schemas import Comparison, Window
from app.adapters.models import Alias
from app.adapters.resolution import targets_of
from app.adapters.target_figures import target_figures
from app.adapters.views import unix
from app.caller import Caller
from app.usage import target_repository as ledger

SAMPLE = 2000
"""Newest completed requests of a target that percentiles are taken of."""
LONGEST = timedelta(days=30)
"""An alias that has not changed for longer is compared over this."""
SPANS: dict[Window, timedelta] = {
    "change": LONGEST,
    "1h": timedelta(hours=1),
    "24h": timedelta(hours=24),
}
MOST_CHANGES = 50


async def compare(
    session: AsyncSession, caller: Caller, name: str, alias: str, window: Window, now: datetime
) -> Comparison:
    """Requests that came by this alias; versions that it left in the window are shown too."""
    adapter, row = await find_alias(session, caller, name, alias)
    since = now - SPANS[window]
    if window == "change":
        since = max(since, row.updated_at)
    weights = {target.version_id: target.weight for target in targets_of(row)}
    versions = {
        version.id: version for version in await repository.versions_of(session, [adapter.id])
    }
    compared = [
        version_id
        for version_id in [*weights, *await _left(session, row, since)]
        if version_id in versions
    ]
    compared = list(dict.fromkeys(compared))[:MAX_TARGETS]
    counts = await ledger.count_by_status(session, compared, row.name, since)
    errors = await ledger.count_by_error(session, compared, row.name, since)
    answered = await ledger.newest_answered(session, compared, row.name, since, SAMPLE)
    targets = [
        target_figures(
            version=versions[version_id].number,
            weight=weights.get(version_id, 0),
            state=versions[version_id].state,
            by_status={status: count for (of, status), count in counts.items() if of == version_id},
            errors=errors.get(version_id, {}),
            answered=answered[version_id],
        )
        for version_id in compared
    ]
    return Comparison(
        adapter=adapter.name,
        alias=row.name,
        revision=row.revision,
        window=window,
        since=unix(since),
        until=unix(now),
        targets=sorted(targets, key=lambda target: (-target.weight, target.version)),
    )


async def _left(session: AsyncSession, row: Alias, since: datetime) -> list[str]:
    """Versions that were targets in the window before its last change; the latest first."""
    changes = await alias_repository.changes_since(
        session, row.adapter_id, row.name, since, MOST_CHANGES
    )
    return [str(target["version_id"]) for change in changes for target in change.before or []]
