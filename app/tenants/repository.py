"""SQL of tenants."""

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.tenants.models import Tenant


def add(session: AsyncSession, tenant: Tenant) -> None:
    session.add(tenant)


async def get(session: AsyncSession, tenant_id: str, *, lock: bool = False) -> Tenant | None:
    query = select(Tenant).where(Tenant.id == tenant_id)
    if lock:
        query = query.with_for_update()
    return (await session.execute(query)).scalar_one_or_none()


async def by_name(session: AsyncSession, name: str) -> Tenant | None:
    return (await session.execute(select(Tenant).where(Tenant.name == name))).scalar_one_or_none()


async def page(session: AsyncSession, *, after: str | None, limit: int) -> list[Tenant]:
    """Newest first; `after` is the last id of the page before."""
    query = select(Tenant).order_by(Tenant.id.desc()).limit(limit)
    if after is not None:
        query = query.where(Tenant.id < after)
    return list((await session.execute(query)).scalars())
