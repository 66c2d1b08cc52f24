"""SQL of requests for other limits."""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.limit_requests.models import LimitRequest
from app.tenants.models import Tenant


def add(session: AsyncSession, row: LimitRequest) -> None:
    session.add(row)


async def count_since(session: AsyncSession, tenant_id: str, since: datetime) -> int:
    query = select(func.count()).where(
        LimitRequest.tenant_id == tenant_id, LimitRequest.created_at > since
    )
    return await session.scalar(query) or 0


async def is_open(session: AsyncSession, tenant_id: str, limit_name: str) -> bool:
    """Whether the tenant waits for an answer about this limit."""
    query = select(func.count()).where(
        LimitRequest.tenant_id == tenant_id,
        LimitRequest.limit_name == limit_name,
        LimitRequest.state == "open",
    )
    return bool(await session.scalar(query))


async def get(
    session: AsyncSession, request_id: str, *, tenant_id: str | None, lock: bool = False
) -> LimitRequest | None:
    """By id; with a tenant, only that tenant's."""
    query = select(LimitRequest).where(LimitRequest.id == request_id)
    if tenant_id is not None:
        query = query.where(LimitRequest.tenant_id == tenant_id)
    if lock:
        query = query.with_for_update()
    return (await session.scalars(query)).one_or_none()


async def page(
    session: AsyncSession,
    *,
    tenant_id: str | None,
    state: str | None,
    after: str | None,
    limit: int,
) -> Sequence[tuple[LimitRequest, str]]:
    """Each with its tenant's name, newest first; with a tenant, only that tenant's."""
    query = select(LimitRequest, Tenant.name).join(Tenant, Tenant.id == LimitRequest.tenant_id)
    if tenant_id is not None:
        query = query.where(LimitRequest.tenant_id == tenant_id)
    if state is not None:
        query = query.where(LimitRequest.state == state)
    if after is not None:
        query = query.where(LimitRequest.id < after)
    rows = await session.execute(query.order_by(LimitRequest.id.desc()).limit(limit))
    return [(row[0], row[1]) for row in rows]


async def waiting_or_answered(
    session: AsyncSession, *, is_open: bool, limit: int
) -> Sequence[tuple[LimitRequest, str]]:
    """Each with its tenant's name; open ones oldest first, answered ones newest first.

    Of any tenant: operators alone ask.
    """
    query = select(LimitRequest, Tenant.name).join(Tenant, Tenant.id == LimitRequest.tenant_id)
    if is_open:
        query = query.where(LimitRequest.state == "open").order_by(LimitRequest.id)
    else:
        answered = LimitRequest.state.in_(("approved", "declined"))
        query = query.where(answered).order_by(LimitRequest.id.desc())
    rows = await session.execute(query.limit(limit))
    return [(row[0], row[1]) for row in rows]


async def erase_tenant(session: AsyncSession, tenant_id: str) -> None:
    """What a tenant wrote goes with it; the audit log keeps that it asked."""
    await session.execute(delete(LimitRequest).where(LimitRequest.tenant_id == tenant_id))
