"""/admin/v1/tenants."""

from typing import Any

from fastapi import APIRouter

from app.audit.service import actor_id
from app.auth import OperatorCaller
from app.db import after_commit
from app.deps import IdempotencyKey, PlatformDep, ReadSession, Session
from app.idempotency.service import create_once
from app.paging import PageDep, list_body
from app.tenants import service
from app.tenants.schemas import TenantIn, TenantLimitsIn, TenantOut

router = APIRouter(prefix="/admin/v1/tenants", tags=["operator: tenants"])


@router.get("")
async def list_tenants(session: ReadSession, _: OperatorCaller, page: PageDep) -> dict[str, Any]:
    rows = await service.list_tenants(session, after=page.after, limit=page.fetch)
    return list_body(page, [TenantOut.of(row) for row in rows])


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
        return TenantOut.of(tenant)

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
    return TenantOut.of(await service.find_tenant(session, tenant_id))


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
    return TenantOut.of(tenant)


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


async def _set_status(
    tenant_id: str, session: Session, platform: PlatformDep, caller: OperatorCaller, *, active: bool
) -> TenantOut:
    tenant = await service.set_status(
        session, tenant_id, active=active, now=platform.clock.now(), actor=caller
    )
    after_commit(session, platform.forget_keys)
    return TenantOut.of(tenant)
