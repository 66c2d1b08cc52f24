"""/admin/v1/tenants."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters.deps import ResourcesDep
from app.audit.service import actor_id
from app.auth import OperatorCaller
from app.db import after_commit
from app.deps import IdempotencyKey, PlatformDep, ReadSession, Session
from app.idempotency.service import create_once
from app.paging import PageDep, list_body
from app.tenants import deletion, service
from app.tenants.models import Tenant
from app.tenants.schemas import TenantIn, TenantLimitsIn, TenantOut, TenantReceipt

router = APIRouter(prefix="/admin/v1/tenants", tags=["operator: tenants"])


AT_ONCE_MS = 5_000.0
"""How long a request to delete erases itself, before it leaves the rest to the sweep."""


@router.get("")
async def list_tenants(
    session: ReadSession,
    _: OperatorCaller,
    page: PageDep,
    deleted: Annotated[bool, Query(description="Also those that are gone.")] = False,
) -> dict[str, Any]:
    rows = await service.list_tenants(session, after=page.after, limit=page.fetch, deleted=deleted)
    used = await service.last_used(session, rows)
    return list_body(page, [TenantOut.of(row, used) for row in rows])


@router.post("", status_code=201)
async def create_tenant(
    body: TenantIn,
    session: Session,
    platform: PlatformDep,
    caller: OperatorCaller,
    key: IdempotencyKey = None,
) -> TenantOut:
    async def create() -> TenantOut:
        tenant = await service.create_tenant(
            session, name=body.name, now=platform.clock.now(), actor=caller, limits=body.limits()
        )
        return TenantOut.of(tenant, {})

    return await create_once(
        session,
        create,
        TenantOut,
        key=key,
        caller_id=actor_id(caller),
        route="tenants",
        body=body,
        secrets=platform.secrets,
        now=platform.clock.now(),
    )


@router.get("/{tenant_id}")
async def get_tenant(tenant_id: str, session: ReadSession, _: OperatorCaller) -> TenantOut:
    return await _shown(session, await service.find_tenant(session, tenant_id))


@router.patch("/{tenant_id}")
async def update_tenant(
    tenant_id: str,
    body: TenantLimitsIn,
    session: Session,
    platform: PlatformDep,
    caller: OperatorCaller,
) -> TenantOut:
    """Only the limits that are sent change."""
    tenant = await service.update_tenant(
        session,
        tenant_id,
        changes=body.model_dump(exclude_unset=True),
        now=platform.clock.now(),
        actor=caller,
    )
    after_commit(session, platform.forget_keys)
    return await _shown(session, tenant)


@router.post("/{tenant_id}/suspend")
async def suspend_tenant(
    tenant_id: str, session: Session, platform: PlatformDep, caller: OperatorCaller
) -> TenantOut:
    """Its keys and users are refused until it is resumed."""
    return await _set_status(tenant_id, session, platform, caller, active=False)


@router.post("/{tenant_id}/resume")
async def resume_tenant(
    tenant_id: str, session: Session, platform: PlatformDep, caller: OperatorCaller
) -> TenantOut:
    return await _set_status(tenant_id, session, platform, caller, active=True)


@router.delete("/{tenant_id}", responses={202: {"model": TenantReceipt}})
async def delete_tenant(
    tenant_id: str,
    platform: PlatformDep,
    resources: ResourcesDep,
    caller: OperatorCaller,
    response: Response,
    confirm: Annotated[str | None, Query(max_length=64, description="The tenant's name.")] = None,
) -> TenantReceipt:
    """Its keys, users and calls end at once; its adapters are erased. 202 until all is gone.

    Asking again is harmless and answers where it stands.
    """
    async with platform.db.transaction() as session:
        await deletion.begin(
            session, tenant_id, confirm=confirm, now=platform.clock.now(), actor=caller
        )
    platform.forget_tenant(tenant_id)
    receipt = await deletion.carry_on(resources, tenant_id, most_ms=AT_ONCE_MS)
    response.status_code = 200 if receipt.complete else 202
    return receipt


@router.get("/{tenant_id}/deletion")
async def get_deletion(tenant_id: str, session: ReadSession, _: OperatorCaller) -> TenantReceipt:
    """What is gone, what is still to go, and what stays."""
    return await deletion.read_receipt(session, tenant_id)


@router.get("/{tenant_id}/deletion/erasures")
async def list_erasures(
    tenant_id: str, session: ReadSession, _: OperatorCaller, page: PageDep
) -> dict[str, Any]:
    """The receipts of its adapters: device, host, disk and prefix cache."""
    rows = await deletion.list_erasures(session, tenant_id, after=page.after, limit=page.fetch)
    return list_body(page, rows)


async def _set_status(
    tenant_id: str, session: Session, platform: PlatformDep, caller: OperatorCaller, *, active: bool
) -> TenantOut:
    tenant = await service.set_status(
        session, tenant_id, active=active, now=platform.clock.now(), actor=caller
    )
    after_commit(session, platform.forget_keys)
    return await _shown(session, tenant)


async def _shown(session: AsyncSession, tenant: Tenant) -> TenantOut:
    return TenantOut.of(tenant, await service.last_used(session, [tenant]))
