"""The alias `live` follows new ready versions until somebody sets it by hand."""

from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters import repository, states
from app.adapters.alias_changes import Action, AliasKey, NewTarget, delete_alias, write_alias
from app.adapters.aliases import WHOLE
from app.adapters.models import AdapterVersion
from app.adapters.names import LIVE
from app.caller import Caller

SYSTEM = "system"


async def follow_live(
    session: AsyncSession, adapter_id: str, tenant_id: str, version_id: str, now: datetime
) -> None:
    """Points `live` at a version that has just become ready, never back to an older one."""
    new = await repository.version_by_id(session, version_id)
    if new is None:
        return
    alias = await repository.alias(session, adapter_id, LIVE)
    if alias is not None:
        if alias.by_hand:
            return
        held = await repository.version_by_id(session, str(alias.targets[0]["version_id"]))
        if held is not None and held.number >= new.number:
            return
    await _point(session, AliasKey(adapter_id, tenant_id, LIVE), new, "follow", SYSTEM, now)


async def release_live(
    session: AsyncSession, adapter_id: str, erased: set[str], now: datetime
) -> None:
    """Moves `live` off versions that are being erased: to the newest ready one, or away."""
    alias = await repository.alias(session, adapter_id, LIVE)
    if alias is None or not any(target["version_id"] in erased for target in alias.targets):
        return
    newest = await newest_ready(session, adapter_id, besides=erased)
    if newest is None:
        await delete_alias(session, alias, action="release", actor=SYSTEM, now=now)
    else:
        key = AliasKey(adapter_id, alias.tenant_id, LIVE)
        await _point(session, key, newest, "release", SYSTEM, now)


async def follow_again(
    session: AsyncSession, key: AliasKey, actor: Caller, now: datetime
) -> AdapterVersion | None:
    """Hands `live` back to the system: on the newest ready version, where it is returned."""
    newest = await newest_ready(session, key.adapter_id)
    if newest is not None:
        await _point(session, key, newest, "follow", actor, now)
    return newest


async def newest_ready(
    session: AsyncSession, adapter_id: str, besides: frozenset[str] | set[str] = frozenset()
) -> AdapterVersion | None:
    ready = [
        version
        for version in await repository.versions_of(session, [adapter_id])
        if version.state == states.READY and version.id not in besides
    ]
    return ready[-1] if ready else None


async def _point(
    session: AsyncSession,
    key: AliasKey,
    version: AdapterVersion,
    action: Action,
    actor: Caller | str,
    now: datetime,
) -> None:
    targets = [NewTarget(version.id, version.number, WHOLE)]
    await write_alias(session, key, targets, action=action, by_hand=False, actor=actor, now=now)
