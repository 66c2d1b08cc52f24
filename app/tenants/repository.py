"""SQL of tenants and of their deletions."""

from collections.abc import Iterable, Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.tenants.models import Tenant, TenantDeletion


def add(session: AsyncSession, tenant: Tenant) -> None:
    session.add(tenant)


async def get(session: AsyncSession, tenant_id: str, *, lock: bool = False) -> Tenant | None:
    query = select(Tenant).where(Tenant.id == tenant_id)
    if lock:
        query = query.with_for_update()
    return (await session.execute(query)).scalar_one_or_none()


async def by_name(session: AsyncSession, name: str) -> Tenant | None:
    return (await session.execute(select(Tenant).where(Tenant.name == name))).scalar_one_or_none()


async def page(
    session: AsyncSession, *, after: str | None, limit: int, deleted: bool = False
) -> list[Tenant]:
    """Newest first; `after` is the last id of the page before. Erased ones only when asked for."""
    query = select(Tenant).order_by(Tenant.id.desc()).limit(limit)
    if not deleted:
        query = query.where(Tenant.erased_at.is_(None))
    if after is not None:
        query = query.where(Tenant.id < after)
    return list((await session.execute(query)).scalars())


# --------------------------------------------------------------------------- deletions


async def deleted_among(session: AsyncSession, tenant_ids: Iterable[str]) -> Sequence[str]:
    """Those of the tenants that are being or have been deleted."""
    query = select(Tenant.id).where(Tenant.id.in_(list(tenant_ids)), Tenant.deleted_at.is_not(None))
    return (await session.scalars(query)).all()


def add_deletion(session: AsyncSession, deletion: TenantDeletion) -> None:
    session.add(deletion)


async def deletion_of(session: AsyncSession, tenant_id: str) -> TenantDeletion | None:
    query = select(TenantDeletion).where(TenantDeletion.tenant_id == tenant_id)
    return (await session.scalars(query)).one_or_none()


async def latest_deletion_named(session: AsyncSession, name: str) -> TenantDeletion | None:
    """Of any tenant: for the operator, who knows the name that it had."""
    query = (
        select(TenantDeletion)
        .where(TenantDeletion.tenant_name == name)
        .order_by(TenantDeletion.id.desc())
        .limit(1)
    )
    return (await session.scalars(query)).one_or_none()


async def open_deletions(session: AsyncSession, limit: int) -> Sequence[str]:
    """Of any tenant: ids of the tenants whose deletion the sweep has to carry on, the longest
    untouched first."""
    query = (
        select(TenantDeletion.tenant_id)
        .where(TenantDeletion.complete.is_(False))
        .order_by(TenantDeletion.updated_at, TenantDeletion.id)
        .limit(limit)
    )
    return (await session.scalars(query)).all()
