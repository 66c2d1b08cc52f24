"""A canary's targets side by side, from the ledger: three statements however many targets."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters import alias_repository, repository
from app.adapters.alias_schemas import AliasChangeObject, AliasObject
from app.adapters.alias_service import find_alias
from app.adapters.aliases import MAX_TARGETS
from app.adapters.comparison_schemas import Comparison, Window
from app.adapters.models import Adapter, AdapterVersion, Alias, AliasChange
from app.adapters.resolution import targets_of
from app.adapters.target_figures import target_figures
from app.adapters.views import alias_object, change_object, unix
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
    versions = await repository.versions_of(session, [adapter.id])
    changes = await alias_repository.changes_since(
        session, row.adapter_id, row.name, _since(row, window, now), MOST_CHANGES
    )
    return await _compare(session, _Held(adapter, row, versions, changes), window, now)


@dataclass(frozen=True, slots=True)
class AliasOverview:
    """All that is known of an alias; `history` is its newest MOST_CHANGES changes."""

    alias: AliasObject
    versions: Sequence[AdapterVersion]
    history: list[AliasChangeObject]
    comparison: Comparison


async def alias_overview(
    session: AsyncSession, caller: Caller, name: str, alias: str, window: Window, now: datetime
) -> AliasOverview:
    """Seven statements. Raises NotFound as `find_alias` does."""
    adapter, row = await find_alias(session, caller, name, alias)
    versions = await repository.versions_of(session, [adapter.id])
    changes = await alias_repository.page_changes(
        session, adapter.id, row.name, before=None, limit=MOST_CHANGES
    )
    return AliasOverview(
        alias=alias_object(adapter, row, {version.id: version.number for version in versions}),
        versions=versions,
        history=[change_object(change) for change in changes],
        comparison=await _compare(session, _Held(adapter, row, versions, changes), window, now),
    )


@dataclass(frozen=True, slots=True)
class _Held:
    """An alias, the adapter's versions, and changes of it, the newest first."""

    adapter: Adapter
    alias: Alias
    versions: Sequence[AdapterVersion]
    changes: Sequence[AliasChange]


def _since(row: Alias, window: Window, now: datetime) -> datetime:
    since = now - SPANS[window]
    return max(since, row.updated_at) if window == "change" else since


async def _compare(session: AsyncSession, held: _Held, window: Window, now: datetime) -> Comparison:
    """Three statements of the ledger's."""
    row, since = held.alias, _since(held.alias, window, now)
    weights = {target.version_id: target.weight for target in targets_of(row)}
    versions = {version.id: version for version in held.versions}
    compared = [
        version_id
        for version_id in [*weights, *_left(held.changes, since)]
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
        adapter=held.adapter.name,
        alias=row.name,
        revision=row.revision,
        window=window,
        since=unix(since),
        until=unix(now),
        targets=sorted(targets, key=lambda target: (-target.weight, target.version)),
    )


def _left(changes: Sequence[AliasChange], since: datetime) -> list[str]:
    """Versions that were targets in the window before its last change; the latest first."""
    return [
        str(target["version_id"])
        for change in changes
        if change.at > since
        for target in change.before or []
    ]
