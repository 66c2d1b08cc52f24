"""The alias `live` follows new ready versions until somebody sets it by hand."""

from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters import repository, states
from app.adapters.aliases import WHOLE
from app.adapters.models import Alias
from app.adapters.names import LIVE


async def follow_live(
    session: AsyncSession, adapter_id: str, tenant_id: str, version_id: str, now: datetime
) -> None:
    """Points `live` at a version that has just become ready, never back to an older one."""
    alias = await repository.alias(session, adapter_id, LIVE)
    if alias is None:
        alias = Alias(adapter_id=adapter_id, name=LIVE, tenant_id=tenant_id, by_hand=False)
        session.add(alias)
    elif alias.by_hand:
        return
    else:
        new = await repository.version_by_id(session, version_id)
        held = await repository.version_by_id(session, str(alias.targets[0]["version_id"]))
        if new is not None and held is not None and held.number > new.number:
            return
    _point(alias, version_id, now)


async def release_live(
    session: AsyncSession, adapter_id: str, erased: set[str], now: datetime
) -> None:
    """Moves `live` off versions that are being erased: to the newest ready one, or away."""
    alias = await repository.alias(session, adapter_id, LIVE)
    if alias is None or not any(target["version_id"] in erased for target in alias.targets):
        return
    ready = [
        version
        for version in await repository.versions_of(session, [adapter_id])
        if version.state == states.READY and version.id not in erased
    ]
    if ready:
        _point(alias, ready[-1].id, now)
    else:
        await session.delete(alias)


def _point(alias: Alias, version_id: str, now: datetime) -> None:
    alias.targets = [{"version_id": version_id, "weight": WHOLE}]
    alias.updated_by = "system"
    alias.updated_at = now
