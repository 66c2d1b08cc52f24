"""When the engines serve another base model, what was validated against the old one is due again.

A version names the digest of its base. While no engine serves that base it is not called: the
router finds no engine for it, and from the sweep on the version itself says `base_changed`, queued
like a new upload. It becomes ready or rejected by what the new base says of it.
"""

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters import base_models, intake, repository, run_repository, states, sweeps
from app.adapters.models import AdapterVersion, BaseModel, ValidationRun
from app.adapters.probes import Engine
from app.adapters.resources import Resources
from app.audit import service as audit
from engine.errors import EngineError
from engine.types import ModelDescription

log = structlog.get_logger(__name__)

CODE = "base_changed"
REASON = "The base model was changed; this version is being validated against the new one."
DESCRIBE_TIMEOUT_S = 5.0
GONE_AFTER = timedelta(minutes=10)
"""While an engine does not answer, a base that was seen this recently may still be its own."""
BATCH = 200


async def sweep_base_change(resources: Resources) -> int:
    """Makes versions due whose base no engine serves any more; how many."""
    described = await asyncio.gather(*(_describe(engine) for engine in resources.engines))
    served = [description for description in described if description is not None]
    if not served:
        return 0  # nothing to validate against: a restart is no change
    now = resources.clock.now()
    for description in served:
        await base_models.remember(resources.db, description, now)
    async with resources.db.reading() as session:
        known = await repository.base_models(session)
        gone = gone_bases(known, served, now, all_answered=None not in described)
        versions = await repository.ready_on(session, gone, BATCH) if gone else []
    count = 0
    for version in versions:
        count += await _make_due(resources, version.id)
    if count:
        log.warning("base_changed", versions=count, gone=sorted(d[:12] for d in gone))
    return count


def gone_bases(
    known: Sequence[BaseModel],
    served: Sequence[ModelDescription],
    now: datetime,
    *,
    all_answered: bool,
) -> set[str]:
    """Digests of the bases that no engine serves now, as far as that can be told."""
    here = {description.base_digest for description in served}
    return {
        base.base_digest
        for base in known
        if base.base_digest not in here and (all_answered or now - base.last_seen_at > GONE_AFTER)
    }


async def is_current(session: AsyncSession, version: AdapterVersion) -> bool:
    """Whether the version's base is one that engines have served lately."""
    known = await repository.base_models(session)
    if not known or version.base_digest == known[0].base_digest:
        return True
    return any(
        base.base_digest == version.base_digest
        and known[0].last_seen_at - base.last_seen_at <= GONE_AFTER
        for base in known
    )


async def make_due(
    resources: Resources, session: AsyncSession, version: AdapterVersion, *, frm: str
) -> ValidationRun | None:
    """Queues the version again in the caller's transaction; None when it is no longer in `frm`."""
    moved = await repository.move(
        session,
        version.id,
        states.UPLOADED,
        frm=frm,
        now=resources.clock.now(),
        code=CODE,
        reason=REASON,
    )
    if not moved or await run_repository.open_run(session, version.id) is not None:
        return None
    run = intake.open_run(session, version, resources)
    await session.flush()
    return run


async def _make_due(resources: Resources, version_id: str) -> bool:
    async with resources.db.transaction() as session:
        version = await repository.version_by_id(session, version_id)
        if version is None:
            return False
        run = await make_due(resources, session, version, frm=states.READY)
        if run is None:
            return False
        await audit.record(
            session,
            actor="sweep",
            action="adapter.base_changed",
            target=version.id,
            tenant_id=version.tenant_id,
            detail={"adapter_id": version.adapter_id, "from": version.base_digest},
        )
    await sweeps.send(resources, run.id, version_id)
    return True


async def _describe(engine: Engine) -> ModelDescription | None:
    try:
        async with asyncio.timeout(DESCRIBE_TIMEOUT_S):
            return await engine.describe()
    except (EngineError, TimeoutError):
        return None
