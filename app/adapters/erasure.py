"""Erasing versions: no call finds them from the first commit on; a receipt says what went where.

The order is rows, files, engines: what is gone from the store cannot be loaded again.
"""

import asyncio
from datetime import datetime
from typing import Any

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters import repository, run_repository, states
from app.adapters.live_alias import release_live
from app.adapters.models import Adapter, AdapterVersion, Erasure
from app.adapters.names import clip
from app.adapters.probes import Engine
from app.adapters.resolution import scoped, targets_of
from app.adapters.resources import Resources
from app.adapters.schemas import ErasureReceipt
from app.adapters.service import find_adapter, find_version, require_writer
from app.adapters.views import receipt_object
from app.audit import service as audit
from app.caller import Caller
from app.errors import Conflict
from app.ids import new_id
from app.tenants import repository as tenants
from engine.errors import EngineError
from engine.types import AdapterRef

log = structlog.get_logger(__name__)

FORGET_TIMEOUT_S = 5.0
FORGET_AGAIN_S = 0.2
FORGET_TRIES = 5
ERASED = "erased"
PENDING = "pending"
KEPT = "kept"


async def erase(
    resources: Resources, caller: Caller, name: str, number: int | None = None
) -> ErasureReceipt:
    """Erases one version, or the adapter with all of them; engines that are away stay pending."""
    require_writer(caller)
    async with scoped(resources.db, caller, write=True) as session:
        await repository.lock_tenant(session, caller.tenant_id)
        if number is None:
            adapter = await find_adapter(session, caller, name)
            versions = list(await repository.versions_of(session, [adapter.id]))
        else:
            adapter, version = await find_version(session, caller, name, number)
            versions = [version]
        erasure_id = await _erase_rows(resources, session, caller, adapter, versions, number)
    return await carry_out(resources, erasure_id)


async def _erase_rows(
    resources: Resources,
    session: AsyncSession,
    caller: Caller,
    adapter: Adapter,
    versions: list[AdapterVersion],
    number: int | None,
) -> str:
    now = resources.clock.now()
    erased = {version.id for version in versions}
    if number is None:
        await repository.drop_aliases(session, adapter.id)
        adapter.erased_at = now
    else:
        await check_aliases(session, adapter, erased, number)
        await release_live(session, adapter.id, erased, now)
    await run_repository.cancel_open(session, erased, now)
    for version in versions:
        await repository.move(session, version.id, states.ERASED, now=now, erased_at=now)
    erasure = Erasure(
        id=new_id("era"),
        tenant_id=caller.tenant_id,
        adapter_id=adapter.id,
        complete=False,
        items=[_item(version, len(resources.engines)) for version in versions],
        created_by=audit.actor_id(caller),
        created_at=now,
        updated_at=now,
    )
    session.add(erasure)
    await audit.record(
        session,
        actor=caller,
        action="adapter.erase" if number is None else "adapter.version_erase",
        target=adapter.id,
        tenant_id=caller.tenant_id,
        detail={"name": adapter.name, "versions": sorted(v.number for v in versions)},
    )
    return erasure.id


async def check_aliases(
    session: AsyncSession, adapter: Adapter, erased: set[str], number: int
) -> None:
    """An alias that somebody set by hand is not moved behind their back."""
    for alias in await repository.aliases_of(session, [adapter.id]):
        if alias.by_hand and any(t.version_id in erased for t in targets_of(alias)):
            raise Conflict(
                f"The alias {clip(alias.name)!r} points at version {number}; point it elsewhere "
                "first, or delete the whole adapter.",
                code="version_in_use",
                param="version",
            )


def _item(version: AdapterVersion, engines: int) -> dict[str, Any]:
    return {
        "version_id": version.id,
        "version": version.number,
        "digest": version.digest,
        "disk": PENDING,
        "kept_for": [],
        "engines": [_acknowledgement(index, PENDING) for index in range(engines)],
    }


def _acknowledgement(index: int, state: str) -> dict[str, str]:
    """Engines are numbered: their addresses are no tenant's business."""
    return {"engine": f"engine-{index}", "device": state, "host": state, "prefix_cache": state}


async def carry_out(resources: Resources, erasure_id: str) -> ErasureReceipt:
    """Removes files and asks engines to forget; what is pending is left to the next sweep."""
    async with resources.db.transaction() as session:
        erasure = await repository.erasure(session, erasure_id)
        await repository.lock_tenant(session, erasure.tenant_id)
        await session.refresh(erasure)
        tenant = await tenants.get(session, erasure.tenant_id)
        items = [dict(item) for item in erasure.items]
        refs: list[AdapterRef] = []
        for item in items:
            ref = AdapterRef(salt=tenant.salt if tenant else "", digest=item["digest"])
            refs.append(ref)
            if item["disk"] == PENDING:
                await _erase_files(resources, session, erasure.tenant_id, item, ref)
        erasure.items = items
    for item, ref in zip(items, refs, strict=True):
        if item["disk"] == ERASED:
            item["engines"] = await _forget(resources, ref)
    return await _write_receipt(resources, erasure_id, items, resources.clock.now())


async def _erase_files(
    resources: Resources,
    session: AsyncSession,
    tenant_id: str,
    item: dict[str, Any],
    ref: AdapterRef,
) -> None:
    """Content that another version of the tenant's still has is kept for that one."""
    others = await repository.others_with_digest(
        session, tenant_id, ref.digest, besides=[item["version_id"]]
    )
    if others:
        item["disk"] = KEPT
        item["kept_for"] = [version.id for version in others]
        item["engines"] = []
        return
    await asyncio.to_thread(resources.store.delete, ref)
    item["disk"] = ERASED


async def _forget(resources: Resources, ref: AdapterRef) -> list[dict[str, str]]:
    """Asks every engine that there is now, each time anew: engines come and go."""
    entries = []
    for index, engine in enumerate(resources.engines):
        forgotten = await _ask_to_forget(engine, ref)
        if not forgotten:
            log.warning("an engine did not acknowledge an erasure", engine=index)
        entries.append(_acknowledgement(index, ERASED if forgotten else PENDING))
    return entries


async def _ask_to_forget(engine: Engine, ref: AdapterRef) -> bool:
    """Whether the engine holds nothing of it any more; asked again while a load is under way."""
    try:
        async with asyncio.timeout(FORGET_TIMEOUT_S):
            for _ in range(FORGET_TRIES):
                if await engine.forget(ref):
                    return True
                await asyncio.sleep(FORGET_AGAIN_S)
    except (EngineError, TimeoutError):
        return False
    return False


async def _write_receipt(
    resources: Resources, erasure_id: str, items: list[dict[str, Any]], now: datetime
) -> ErasureReceipt:
    async with resources.db.transaction() as session:
        erasure = await repository.erasure(session, erasure_id)
        erasure.items = items
        erasure.complete = all(
            item["disk"] != PENDING and all(e["device"] == ERASED for e in item["engines"])
            for item in items
        )
        erasure.updated_at = now
        return receipt_object(erasure)
