"""Taking a version out of service and back: its files stay, so nothing is uploaded again."""

from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters import base_change, intake, repository, states, sweeps
from app.adapters.erasure import check_aliases
from app.adapters.live_alias import follow_live, release_live
from app.adapters.models import AdapterVersion
from app.adapters.resolution import scoped
from app.adapters.resources import Resources
from app.adapters.schemas import VersionObject
from app.adapters.service import find_version, require_writer, with_report
from app.audit import service as audit
from app.caller import Caller
from app.errors import Conflict


async def archive(resources: Resources, caller: Caller, name: str, number: int) -> VersionObject:
    """No call reaches the version from the commit on; calls that run go on.

    Raises Conflict while an alias that was set by hand points at it, or when it is not ready.
    """
    require_writer(caller)
    now = resources.clock.now()
    async with scoped(resources.db, caller, write=True) as session:
        await repository.lock_tenant(session, caller.tenant_id)
        adapter, version = await find_version(session, caller, name, number)
        if version.state != states.ARCHIVED:
            await check_aliases(session, adapter, {version.id}, number)
            await _move(session, version, states.ARCHIVED, now=now)
            await release_live(session, adapter.id, {version.id}, now)
            await _audit(session, caller, "adapter.archive", version)
        return await with_report(session, adapter, version)


async def unarchive(resources: Resources, caller: Caller, name: str, number: int) -> VersionObject:
    """Brings it back: ready at once, or by way of validation when the base model has changed."""
    require_writer(caller)
    now = resources.clock.now()
    run = None
    async with scoped(resources.db, caller, write=True) as session:
        await intake.lock_living_tenant(session, caller)
        adapter, version = await find_version(session, caller, name, number)
        if version.state == states.READY:
            return await with_report(session, adapter, version)
        if version.state != states.ARCHIVED:
            raise _wrong_state(version, "only an archived version can be brought back")
        if await base_change.is_current(session, version):
            await _move(session, version, states.READY, now=now)
            await follow_live(session, adapter.id, caller.tenant_id, version.id, now)
        else:
            run = await base_change.make_due(resources, session, version, frm=states.ARCHIVED)
        await _audit(session, caller, "adapter.unarchive", version)
        await session.refresh(version)
        view = await with_report(session, adapter, version)
    if run is not None:
        await sweeps.send(resources, run.id, view.id)
    return view


async def _move(session: AsyncSession, version: AdapterVersion, to: str, **values: object) -> None:
    """Raises Conflict from any state but the one that leads there."""
    frm = states.READY if to == states.ARCHIVED else states.ARCHIVED
    if not await repository.move(session, version.id, to, frm=frm, **values):  # type: ignore[arg-type]
        raise _wrong_state(version, "only one that is ready can be archived")
    await session.refresh(version)


def _wrong_state(version: AdapterVersion, remedy: str) -> Conflict:
    return Conflict(
        f"Version {version.number} is {version.state}; {remedy}.",
        code="version_not_ready" if "ready" in remedy else "version_not_archived",
        param="version",
    )


async def _audit(
    session: AsyncSession, caller: Caller, action: str, version: AdapterVersion
) -> None:
    await audit.record(
        session,
        actor=caller,
        action=action,
        target=version.id,
        tenant_id=caller.tenant_id,
        detail={"adapter_id": version.adapter_id, "version": version.number},
    )
