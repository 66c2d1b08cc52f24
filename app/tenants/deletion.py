"""Deleting a tenant: refused from the first commit on, erased step by step, with a receipt.

    begin       one transaction: no key, session, webhook or upload of the tenant's works any more
    carry_on    erases adapters, waits for calls and engines, and at last says `complete`
    sweep       beat's: carries on whatever a crash or an engine that is away has left

Every step looks at what is still there, so any process may repeat any of them.
"""

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta

import structlog
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters import erasure, resumable
from app.adapters import repository as adapters
from app.adapters import upload_repository as upload_rows
from app.adapters.resources import Resources
from app.adapters.schemas import ErasureReceipt
from app.adapters.views import receipt_object
from app.audit import service as audit
from app.caller import Caller
from app.errors import AppError, InvalidRequest, NotFound
from app.ids import new_id
from app.keys import repository as keys
from app.limit_requests import repository as limit_requests
from app.platform import Platform
from app.tenants import repository
from app.tenants.models import Tenant, TenantDeletion
from app.tenants.schemas import DeletedAdapters, KeptItem, TenantReceipt
from app.tenants.service import find_tenant
from app.usage import repository as usage
from app.users import repository as users
from app.webhooks import repository as webhooks

log = structlog.get_logger("loramux.tenants")

HEARD_AFTER = timedelta(seconds=10)
"""By then every api process has forgotten the tenant's keys and ended its calls."""
BATCH = 50
KEPT = (
    KeptItem(
        what="the usage ledger: token counts with the ids of requests, keys and adapters",
        why="invoices are made from it and must stay provable",
    ),
    KeptItem(
        what="the audit log: who did what, with the emails of those who did",
        why="it is append-only, so that nobody can erase their traces",
    ),
    KeptItem(
        what="rows without content: the tenant, its revoked keys (hash, last four characters), "
        "its adapters' names, digests and validation reports",
        why="the ledger and the audit log speak of them",
    ),
    KeptItem(
        what="prompts' attention states in an engine's memory, of calls without an adapter",
        why="they are keyed by the tenant's salt, so no call finds them; they are overwritten as "
        "memory is needed, and gone when the engine restarts",
    ),
    KeptItem(
        what="backups of the database and of the adapter store that the operator makes",
        why="they are outside this erasure; they keep everything until they are rotated",
    ),
)


async def begin(
    session: AsyncSession,
    tenant_id: str,
    *,
    confirm: str | None,
    now: datetime,
    actor: Caller | str,
) -> TenantDeletion:
    """Marks the tenant, revokes its keys, removes its users; the deletion that there is now.

    `confirm` is the tenant's name, typed by whoever means it. A tenant that is being deleted is
    left as it is. The caller makes processes forget: `Platform.forget_tenant`.
    """
    tenant = await find_tenant(session, tenant_id, lock=True)
    found = await repository.deletion_of(session, tenant_id)
    if found is not None:
        return found
    if confirm != tenant.name:
        raise InvalidRequest(
            "Deleting a tenant erases its adapters and cannot be undone: send its name as "
            "`confirm`.",
            code="confirmation_needed",
            param="confirm",
        )
    revoked = await keys.revoke_all(session, tenant.id, now)
    removed, ended = await users.delete_of_tenant(session, tenant.id)
    await webhooks.erase_tenant(session, tenant.id)
    await limit_requests.erase_tenant(session, tenant.id)
    tenant.status = "suspended"
    tenant.deleted_at = tenant.updated_at = now
    counts = {
        "keys_revoked": revoked,
        "users_removed": removed,
        "sessions_ended": ended,
        "uploads_dropped": await upload_rows.expire_all(session, tenant.id, now),
    }
    deletion = TenantDeletion(
        id=new_id("del"),
        tenant_id=tenant.id,
        tenant_name=tenant.name,
        complete=False,
        counts=counts,
        created_by=audit.actor_id(actor),
        created_at=now,
        updated_at=now,
    )
    repository.add_deletion(session, deletion)
    await audit.record(
        session,
        actor=actor,
        action="tenant.delete",
        target=tenant.id,
        tenant_id=tenant.id,
        detail={"name": tenant.name, **counts},
        at=now,
    )
    return deletion


async def carry_on(
    resources: Resources, tenant_id: str, *, most_ms: float | None = None
) -> TenantReceipt:
    """Erases what is left, for `most_ms` at most, and closes the deletion when nothing is."""
    began_ms = resources.clock.monotonic_ms()
    async with resources.db.reading() as session:
        tenant = await find_tenant(session, tenant_id)
        deletion = await _deletion(session, tenant_id)
        complete = deletion.complete
        unfinished = await upload_rows.ids_of(session, tenant_id)
    await _drop_uploads(resources, unfinished)
    while not complete:
        async with resources.db.reading() as session:
            rows = await adapters.page_adapters(session, tenant_id, after=None, limit=BATCH)
        for row in rows:
            if most_ms is not None and resources.clock.monotonic_ms() - began_ms > most_ms:
                return await receipt(resources, tenant_id)
            await _erase(resources, _eraser(tenant, deletion), row.name)
        if not rows:
            break
    await resumable.drop_of_tenant(resources, tenant_id)
    await _close_if_done(resources, tenant_id)
    return await receipt(resources, tenant_id)


async def _drop_uploads(resources: Resources, upload_ids: Sequence[str]) -> None:
    """Parts first: rows that are gone would leave them to the hourly sweep."""
    for upload_id in upload_ids:
        await asyncio.to_thread(resources.store.drop_parts, upload_id)
    async with resources.db.transaction() as session:
        for upload_id in upload_ids:
            await upload_rows.drop(session, upload_id)


async def _erase(resources: Resources, eraser: Caller, name: str) -> None:
    try:
        await erasure.erase(resources, eraser, name)
    except NotFound:
        log.info("erased_meanwhile", tenant=eraser.tenant_id)  # by another pass, or its owner


def _eraser(tenant: Tenant, deletion: TenantDeletion) -> Caller:
    """Whoever asked for the deletion, inside the tenant."""
    return Caller(
        tenant_id=tenant.id,
        tenant_name=tenant.name,
        tenant_salt=tenant.salt,
        role="operator",
        user_id=deletion.created_by,
        label=f"deletion of {deletion.tenant_name}",
    )


async def _close_if_done(resources: Resources, tenant_id: str) -> None:
    now = resources.clock.now()
    async with resources.db.transaction() as session:
        tenant = await find_tenant(session, tenant_id, lock=True)
        deletion = await _deletion(session, tenant_id)
        await session.refresh(deletion)
        if deletion.complete:
            return
        deletion.updated_at = now
        counts = await _count(session, tenant_id)
        calls = await usage.count_open(session, tenant_id)
        heard = now - deletion.created_at >= HEARD_AFTER
        if not heard or calls or counts.left or counts.pending:
            return
        # what a transaction that had read the tenant before the deletion has added since
        await keys.revoke_all(session, tenant_id, now)
        await webhooks.erase_tenant(session, tenant_id)
        await limit_requests.erase_tenant(session, tenant_id)
        await users.delete_of_tenant(session, tenant_id)
        tenant.name = tenant.id  # frees the name; no name has an underscore
        tenant.erased_at = tenant.updated_at = now
        deletion.complete = True
        deletion.completed_at = now
        await audit.record(
            session,
            actor="deletion",
            action="tenant.erased",
            target=tenant.id,
            tenant_id=tenant.id,
            detail={"name": deletion.tenant_name, "adapters": counts.erased},
            at=now,
        )


async def receipt(resources: Resources, tenant_id: str) -> TenantReceipt:
    """Where the deletion stands. Raises NotFound for a tenant that nobody deleted."""
    async with resources.db.reading() as session:
        return await read_receipt(session, tenant_id)


async def read_receipt(session: AsyncSession, tenant_id: str) -> TenantReceipt:
    deletion = await _deletion(session, tenant_id)
    return TenantReceipt(
        id=deletion.id,
        tenant_id=tenant_id,
        tenant_name=deletion.tenant_name,
        complete=deletion.complete,
        keys_revoked=deletion.counts["keys_revoked"],
        users_removed=deletion.counts["users_removed"],
        sessions_ended=deletion.counts["sessions_ended"],
        uploads_dropped=deletion.counts["uploads_dropped"],
        calls_running=await usage.count_open(session, tenant_id),
        adapters=await _count(session, tenant_id),
        kept=list(KEPT),
        created_by=deletion.created_by,
        created_at=deletion.created_at,
        completed_at=deletion.completed_at,
    )


async def list_erasures(
    session: AsyncSession, tenant_id: str, *, after: str | None, limit: int
) -> list[ErasureReceipt]:
    """The receipts of the tenant's adapters, newest first."""
    await _deletion(session, tenant_id)
    rows = await adapters.page_erasures(session, tenant_id, after=after, limit=limit)
    return [receipt_object(row) for row in rows]


async def find_deleted(session: AsyncSession, name: str) -> TenantDeletion:
    """By the tenant's id, or the name that it had. Raises NotFound."""
    found = await repository.deletion_of(session, name)
    found = found or await repository.latest_deletion_named(session, name)
    if found is None:
        raise NotFound(f"No tenant {name[:64]!r} has been deleted.")
    return found


async def sweep(resources: Resources) -> int:
    """Carries every open deletion on; how many are still open. One that fails stops no other."""
    async with resources.db.reading() as session:
        waiting = await repository.open_deletions(session, BATCH)
    still = 0
    for tenant_id in waiting:
        try:
            still += not (await carry_on(resources, tenant_id)).complete
        except (AppError, SQLAlchemyError, OSError) as error:
            still += 1
            log.error("deletion_failed", tenant=tenant_id, error=type(error).__name__)
    return still


async def end_calls_of_deleted(platform: Platform) -> int:
    """Every few seconds in every api process: ends calls that were let in before a deletion."""
    busy = list(platform.running.tenants())
    if not busy:
        return 0
    async with platform.db.reading() as session:
        gone = await repository.deleted_among(session, busy)
    return sum(platform.running.abort_tenant(tenant_id) for tenant_id in gone)


async def _count(session: AsyncSession, tenant_id: str) -> DeletedAdapters:
    receipts, pending = await adapters.count_erasures(session, tenant_id)
    left = await adapters.count_adapters(session, tenant_id)
    return DeletedAdapters(left=left, erased=receipts - pending, pending=pending)


async def _deletion(session: AsyncSession, tenant_id: str) -> TenantDeletion:
    found = await repository.deletion_of(session, tenant_id)
    if found is None:
        raise NotFound(f"No tenant {tenant_id[:64]!r} has been deleted.")
    return found
