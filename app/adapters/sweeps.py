"""What beat runs: lost work is found by its rows, whatever the broker lost."""

import asyncio
from datetime import timedelta

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters import erasure, repository, run_repository, states, upload_repository
from app.adapters.models import ValidationRun
from app.adapters.notices import announce
from app.adapters.resources import QueueUnavailable, Resources
from app.audit import service as audit
from engine.types import AdapterRef

log = structlog.get_logger(__name__)

VALIDATE_TASK = "adapters.validate"
RESEND_AFTER = timedelta(seconds=120)
"""A queued run whose message is older is sent again; a second delivery does no harm."""
BATCH = 200
STAGING_AGE_S = 6 * 3600.0
UPLOAD_KEY_AGE = timedelta(days=2)


async def sweep_validations(resources: Resources) -> int:
    """Sends every run that nobody works on to a worker; how many were sent.

    A run whose last attempt died with its worker is given up, visibly.
    """
    now = resources.clock.now()
    async with resources.db.reading() as session:
        runs = await run_repository.due(
            session, now=now, sent_before=now - RESEND_AFTER, limit=BATCH
        )
    sent = 0
    for run in runs:
        if run.attempts >= resources.settings.validation_attempts:
            await _give_up(resources, run)
        elif await send(resources, run.id, run.version_id):
            sent += 1
    return sent


async def send(resources: Resources, run_id: str, version_id: str) -> bool:
    """Puts a run's task on the broker; False, and left to the next sweep, when it is away."""
    try:
        await resources.queue.send(VALIDATE_TASK, version_id)
    except QueueUnavailable as error:
        log.warning("the task queue is away", error=str(error))
        return False
    async with resources.db.transaction() as session:
        await run_repository.set_sent(session, [run_id], resources.clock.now())
    return True


async def _give_up(resources: Resources, run: ValidationRun) -> None:
    now = resources.clock.now()
    code = run.code or "worker_lost"
    message = run.message or "the worker died in every attempt to check this adapter"
    async with resources.db.transaction() as session:
        if not await run_repository.close_abandoned(
            session, run.id, now=now, code=code, message=message
        ):
            return
        await repository.move(
            session, run.version_id, states.FAILED, now=now, code=code, reason=message
        )
        await announce(session, run.version_id, resources.settings, now)
        await audit.record(
            session,
            actor="sweep",
            action="adapter.failed",
            target=run.version_id,
            tenant_id=run.tenant_id,
            detail={"code": code, "attempts": run.attempts},
        )


async def sweep_staging(resources: Resources) -> int:
    """Removes what broken-off uploads left in the store's staging, and old idempotency keys."""
    now = resources.clock.now()
    removed = await asyncio.to_thread(resources.store.sweep, STAGING_AGE_S)
    async with resources.db.transaction() as session:
        await repository.drop_upload_keys_before(session, now - UPLOAD_KEY_AGE)
    return removed


async def sweep_uploads(resources: Resources) -> int:
    """Drops uploads whose day is over, and parts in the store that no open upload has."""
    now = resources.clock.now()
    async with resources.db.transaction() as session:
        expired = await upload_repository.expired(session, now, BATCH)
        for upload_id in expired:
            await upload_repository.drop(session, upload_id)
    with_parts = await asyncio.to_thread(resources.store.uploads_with_parts)
    async with resources.db.reading() as session:
        wanted = await upload_repository.still_open(session, with_parts)
    for upload_id in with_parts:
        if upload_id not in wanted:
            await asyncio.to_thread(resources.store.drop_parts, upload_id)
    return len(expired)


async def sweep_orphans(resources: Resources) -> int:
    """Removes stored files that no version has: a crash fell between the files and their row.

    An upload commits both under its tenant's lock, so under that lock an orphan is one for good.
    """
    removed = 0
    for ref in await asyncio.to_thread(lambda: list(resources.store.refs())):
        async with resources.db.reading() as session:
            tenant_id = await repository.tenant_with_salt(session, ref.salt)
            if tenant_id is None or await _in_use(session, tenant_id, ref):
                continue
        async with resources.db.transaction() as session:
            await repository.lock_tenant(session, tenant_id)
            if not await _in_use(session, tenant_id, ref):
                removed += await asyncio.to_thread(resources.store.delete, ref)
    return removed


async def _in_use(session: AsyncSession, tenant_id: str, ref: AdapterRef) -> bool:
    holders = await repository.others_with_digest(session, tenant_id, ref.digest, besides=[])
    return bool(holders)


async def sweep_erasures(resources: Resources) -> int:
    """Asks engines again that have not yet acknowledged an erasure; how many are still open."""
    async with resources.db.reading() as session:
        waiting = [row.id for row in await repository.open_erasures(session, BATCH)]
    still = 0
    for erasure_id in waiting:
        receipt = await erasure.carry_out(resources, erasure_id)
        still += not receipt.complete
    return still
