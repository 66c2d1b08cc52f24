"""SQL of tenants and of their deletions."""

from collections.abc import Iterable, Sequence
from datetime import datetime

from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.keys.models import ApiKey
from app.table_repository import read_table
from app.tables import Table, TableQuery
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


async def named(session: AsyncSession, keys: Iterable[str]) -> dict[str, Tenant]:
    """Tenants by their id and by their salt, as far as `keys` have one of both.

    Of any tenant: for the operator.
    """
    wanted = list(keys)
    query = select(Tenant).where(or_(Tenant.id.in_(wanted), Tenant.salt.in_(wanted)))
    rows = list((await session.scalars(query)).all())
    return {row.id: row for row in rows} | {row.salt: row for row in rows}


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


async def last_used(session: AsyncSession, tenant_ids: Iterable[str]) -> dict[str, datetime]:
    """When a key of each tenant was last used; those never used are left out.

    Of any tenant: for the operator.
    """
    rows = await session.execute(
        select(ApiKey.tenant_id, func.max(ApiKey.last_used_at))
        .where(ApiKey.tenant_id.in_(list(tenant_ids)))
        .group_by(ApiKey.tenant_id)
    )
    return {str(row[0]): row[1] for row in rows if row[1] is not None}


async def table(
    session: AsyncSession, wanted: TableQuery, *, deleted: bool = False
) -> Table[tuple[Tenant, datetime | None]]:
    """Tenants with when a key of theirs was last used. Of any tenant: for the operator."""
    used = (
        select(ApiKey.tenant_id, func.max(ApiKey.last_used_at).label("last_used_at"))
        .group_by(ApiKey.tenant_id)
        .subquery()
    )
    query = select(Tenant, used.c.last_used_at).outerjoin(used, used.c.tenant_id == Tenant.id)
    if not deleted:
        query = query.where(Tenant.erased_at.is_(None))
    return await read_table(
        session,
        query,
        wanted,
        searched=[Tenant.name, Tenant.id],
        sorted_by={
            "name": Tenant.name,
            "status": Tenant.status,
            "weight": Tenant.weight,
            "created_at": Tenant.created_at,
            "last_used_at": used.c.last_used_at,
            "id": Tenant.id,
        },
        default="-id",
    )


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
