"""Moving aliases: set, promote, roll back, delete; each once, audited, in a numbered history.

A call that would change nothing changes nothing: no revision, no event. So every one of them may
be sent again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters import alias_repository, repository, states
from app.adapters.alias_changes import Action, AliasKey, NewTarget, delete_alias, write_alias
from app.adapters.alias_schemas import AliasHistory, AliasObject
from app.adapters.aliases import WHOLE, check_weights
from app.adapters.live_alias import follow_again
from app.adapters.models import Adapter, AdapterVersion, Alias, AliasChange
from app.adapters.names import LIVE, NAME, alias_name, clip
from app.adapters.service import find_adapter, require_writer, version_not_found
from app.adapters.views import alias_object, change_object
from app.audit import service as audit
from app.caller import Caller
from app.errors import Conflict, NotFound
from app.preconditions import Precondition

ANYTHING = Precondition()
ONLY_NEW = Precondition(exists=False)
"""There must be no such alias yet."""


@dataclass(frozen=True, slots=True)
class _Held:
    """An adapter of the caller's under its tenant's lock, and an alias of it as it is now."""

    adapter: Adapter
    key: AliasKey
    row: Alias | None


def alias_not_found(name: str, alias: str) -> NotFound:
    return NotFound(
        f"The adapter {clip(name)!r} has no alias {clip(alias)!r}; "
        f"GET /v1/adapters/{clip(name)}/aliases lists those there are.",
        code="alias_not_found",
        param="alias",
    )


# --------------------------------------------------------------------------- reading


async def list_aliases(session: AsyncSession, caller: Caller, name: str) -> list[AliasObject]:
    adapter = await find_adapter(session, caller, name)
    numbers = await _numbers(session, adapter)
    rows = await repository.aliases_of(session, [adapter.id])
    return [alias_object(adapter, row, numbers) for row in rows]


async def get_alias(session: AsyncSession, caller: Caller, name: str, alias: str) -> AliasObject:
    adapter, row = await find_alias(session, caller, name, alias)
    return alias_object(adapter, row, await _numbers(session, adapter))


async def find_alias(
    session: AsyncSession, caller: Caller, name: str, alias: str
) -> tuple[Adapter, Alias]:
    """Raises NotFound, the same for a foreign adapter and an unknown one."""
    adapter = await find_adapter(session, caller, name)
    row = await repository.alias(session, adapter.id, alias) if NAME.fullmatch(alias) else None
    if row is None:
        raise alias_not_found(name, alias)
    return adapter, row


async def history(
    session: AsyncSession,
    caller: Caller,
    name: str,
    alias: str,
    *,
    before: int | None = None,
    limit: int = 20,
) -> AliasHistory:
    """Newest first; an alias that was deleted still has its history."""
    adapter = await find_adapter(session, caller, name)
    rows: Sequence[AliasChange] = []
    if NAME.fullmatch(alias):
        rows = await alias_repository.page_changes(
            session, adapter.id, alias, before=before, limit=limit + 1
        )
    if not rows and before is None:
        raise alias_not_found(name, alias)
    shown = rows[:limit]
    more = len(rows) > limit
    return AliasHistory(
        data=[change_object(row) for row in shown],
        has_more=more,
        next_before=shown[-1].revision if more else None,
    )


# --------------------------------------------------------------------------- moving


async def set_alias(
    session: AsyncSession,
    caller: Caller,
    name: str,
    alias: str,
    weights: Sequence[tuple[int, int]],
    *,
    now: datetime,
    expected: Precondition = ANYTHING,
) -> AliasObject:
    """Points an alias at versions (number, percent); they must be ready. Returns it as it is now.

    From then on `live` stays where it was put. Raises InvalidRequest, NotFound, Conflict and
    PreconditionFailed.
    """
    require_writer(caller)
    alias_name(alias)
    check_weights(weights)
    held = await _hold(session, caller, name, alias, expected)
    targets = [
        await _ready(session, held.adapter, number, weight, f"targets[{index}].version")
        for index, (number, weight) in enumerate(weights)
    ]
    return await _move(session, caller, held, targets, "set", now)


async def promote(
    session: AsyncSession,
    caller: Caller,
    name: str,
    alias: str,
    number: int,
    *,
    now: datetime,
    expected: Precondition = ANYTHING,
) -> AliasObject:
    """Gives one of the alias's targets all requests."""
    require_writer(caller)
    held = await _hold(session, caller, name, alias, expected)
    if held.row is None:
        raise alias_not_found(name, alias)
    target = await _ready(session, held.adapter, number, WHOLE, "version")
    if target.version_id not in {str(entry["version_id"]) for entry in held.row.targets}:
        raise Conflict(
            f"Version {number} is no target of the alias {clip(alias)!r}, so there is nothing to "
            "promote; set the alias to it instead.",
            code="not_a_target",
            param="version",
        )
    return await _move(session, caller, held, [target], "promote", now)


async def roll_back(
    session: AsyncSession,
    caller: Caller,
    name: str,
    alias: str,
    *,
    now: datetime,
    to_revision: int | None = None,
    expected: Precondition = ANYTHING,
) -> AliasObject:
    """Makes the alias what it was before its last change, or at a revision.

    After a roll back without a revision, another one does nothing: a call that is sent twice must
    not undo itself. To go further back, name the revision.
    """
    require_writer(caller)
    held = await _hold(session, caller, name, alias, expected)
    if held.row is None:
        raise alias_not_found(name, alias)
    wanted = await _earlier(session, held, to_revision)
    if wanted is None:
        return await _shown(session, held)
    targets = [
        await _ready(session, held.adapter, int(t["version"]), int(t["weight"]), "to_revision")
        for t in wanted
    ]
    return await _move(session, caller, held, targets, "rollback", now)


async def _earlier(
    session: AsyncSession, held: _Held, to_revision: int | None
) -> Sequence[dict[str, Any]] | None:
    """The targets to go back to; None when a roll back was the last thing that happened."""
    key = held.key
    if to_revision is None:
        last = await alias_repository.last_change(session, key.adapter_id, key.name)
        if last is not None and last.action == "rollback":
            return None
        wanted = None if last is None else last.before
        missing = "before its last change: that one made it"
    else:
        change = await alias_repository.change_numbered(
            session, key.adapter_id, key.name, to_revision
        )
        if change is None:
            raise NotFound(
                f"The alias {clip(key.name)!r} has no revision {to_revision}; its history lists "
                "those there are.",
                code="revision_not_found",
                param="to_revision",
            )
        wanted = change.targets
        missing = f"at revision {to_revision}: that one deleted it"
    if wanted is None:
        raise Conflict(
            f"There was no alias {clip(key.name)!r} {missing}; set it instead.",
            code="nothing_to_roll_back",
            param="to_revision",
        )
    return wanted


async def remove(
    session: AsyncSession,
    caller: Caller,
    name: str,
    alias: str,
    *,
    now: datetime,
    expected: Precondition = ANYTHING,
) -> None:
    """Takes an alias away. `live` is handed back instead: it follows new versions again."""
    require_writer(caller)
    held = await _hold(session, caller, name, alias, expected)
    row = held.row
    if row is None:
        raise alias_not_found(name, alias)
    before = [dict(target) for target in row.targets]
    after = None
    if alias == LIVE and not row.by_hand:
        return
    if alias == LIVE:
        newest = await follow_again(session, held.key, caller, now)
        after = None if newest is None else [NewTarget(newest.id, newest.number, WHOLE).as_json()]
    if after is None:
        await delete_alias(session, row, action="delete", actor=caller, now=now)
    await _record(session, caller, held, "follow" if after else "delete", before, after)


async def _hold(
    session: AsyncSession, caller: Caller, name: str, alias: str, expected: Precondition
) -> _Held:
    adapter = await find_adapter(session, caller, name)
    await repository.lock_tenant(session, caller.tenant_id)
    row = await repository.alias(session, adapter.id, alias) if NAME.fullmatch(alias) else None
    expected.check(None if row is None else row.revision)
    return _Held(adapter, AliasKey(adapter.id, caller.tenant_id, alias), row)


async def _ready(
    session: AsyncSession, adapter: Adapter, number: int, weight: int, param: str
) -> NewTarget:
    """Raises NotFound or Conflict unless the version may be called."""
    version = await repository.version_numbered(session, adapter.id, number)
    if version is None:
        missing = version_not_found(adapter.name, number)
        missing.param = param
        raise missing
    if version.state != states.READY:
        raise Conflict(
            f"Version {number} of {clip(adapter.name)!r} is {version.state}; an alias may only "
            "point at versions that are ready.",
            code="version_not_ready",
            param=param,
        )
    return NewTarget(version.id, version.number, weight)


async def _move(
    session: AsyncSession,
    caller: Caller,
    held: _Held,
    targets: Sequence[NewTarget],
    action: Action,
    now: datetime,
) -> AliasObject:
    row = held.row
    before = None if row is None else [dict(target) for target in row.targets]
    wanted = {target.version_id: target.weight for target in targets}
    if row is not None and row.by_hand and wanted == _weights(row.targets):
        return await _shown(session, held)
    row = await write_alias(
        session, held.key, targets, action=action, by_hand=True, actor=caller, now=now
    )
    after = [target.as_json() for target in targets]
    await _record(session, caller, held, action, before, after)
    return await _shown(session, _Held(held.adapter, held.key, row))


def _weights(targets: Iterable[dict[str, Any]]) -> dict[str, int]:
    return {str(target["version_id"]): int(target["weight"]) for target in targets}


async def _record(
    session: AsyncSession,
    caller: Caller,
    held: _Held,
    action: str,
    before: list[dict[str, Any]] | None,
    after: list[dict[str, Any]] | None,
) -> None:
    await audit.record(
        session,
        actor=caller,
        action="adapter.alias" if action == "set" else f"adapter.alias_{action}",
        target=held.adapter.id,
        tenant_id=caller.tenant_id,
        detail={"alias": held.key.name, "from": before, "to": after},
    )


async def _shown(session: AsyncSession, held: _Held) -> AliasObject:
    assert held.row is not None
    return alias_object(held.adapter, held.row, await _numbers(session, held.adapter))


async def _numbers(session: AsyncSession, adapter: Adapter) -> dict[str, int]:
    versions: Sequence[AdapterVersion] = await repository.versions_of(session, [adapter.id])
    return {version.id: version.number for version in versions}
