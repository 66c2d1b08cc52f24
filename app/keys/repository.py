"""SQL of API keys."""

from collections.abc import Mapping
from datetime import datetime

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.keys.models import ApiKey
from app.table_repository import read_table
from app.tables import Table, TableQuery
from app.tenants.models import Tenant


def add(session: AsyncSession, key: ApiKey) -> None:
    session.add(key)


async def by_public_id(
    session: AsyncSession, public_id: str
) -> tuple[ApiKey, Tenant | None] | None:
    """The key and its tenant (operators' keys have none).

    Of any tenant: this look-up is what tells the tenant.
    """
    row = (
        await session.execute(
            select(ApiKey, Tenant)
            .outerjoin(Tenant, Tenant.id == ApiKey.tenant_id)
            .where(ApiKey.public_id == public_id)
        )
    ).one_or_none()
    return None if row is None else (row[0], row[1])


async def get(
    session: AsyncSession, key_id: str, *, tenant_id: str | None, lock: bool = False
) -> ApiKey | None:
    """A key by id; with a tenant, only that tenant's."""
    query = select(ApiKey).where(ApiKey.id == key_id)
    if tenant_id is not None:
        query = query.where(ApiKey.tenant_id == tenant_id)
    if lock:
        query = query.with_for_update()
    return (await session.execute(query)).scalar_one_or_none()


async def page(
    session: AsyncSession, *, tenant_id: str | None, after: str | None, limit: int
) -> list[ApiKey]:
    """Newest first; `after` is the last id of the page before."""
    query = select(ApiKey).order_by(ApiKey.id.desc()).limit(limit)
    if tenant_id is not None:
        query = query.where(ApiKey.tenant_id == tenant_id)
    if after is not None:
        query = query.where(ApiKey.id < after)
    return list((await session.execute(query)).scalars())


async def count_working(session: AsyncSession, tenant_id: str, now: datetime) -> int:
    query = (
        select(func.count())
        .select_from(ApiKey)
        .where(ApiKey.tenant_id == tenant_id, ApiKey.revoked_at.is_(None))
        .where((ApiKey.expires_at.is_(None)) | (ApiKey.expires_at > now))
        .where((ApiKey.revoke_at.is_(None)) | (ApiKey.revoke_at > now))
    )
    return (await session.execute(query)).scalar_one()


async def table(
    session: AsyncSession, wanted: TableQuery, *, tenant_id: str | None
) -> Table[tuple[ApiKey, str | None]]:
    """Keys with their tenants' names; with a tenant, only that tenant's."""
    query = select(ApiKey, Tenant.name).outerjoin(Tenant, Tenant.id == ApiKey.tenant_id)
    if tenant_id is not None:
        query = query.where(ApiKey.tenant_id == tenant_id)
    return await read_table(
        session,
        query,
        wanted,
        searched=[ApiKey.name, ApiKey.public_id, ApiKey.last4, Tenant.name, ApiKey.id],
        sorted_by={
            "name": ApiKey.name,
            "tenant": Tenant.name,
            "created_at": ApiKey.created_at,
            "expires_at": ApiKey.expires_at,
            "last_used_at": ApiKey.last_used_at,
            "id": ApiKey.id,
        },
        default="-id",
    )


async def revoke_all(session: AsyncSession, tenant_id: str, now: datetime) -> int:
    """Revokes what is left of a tenant's keys; how many."""
    result = await session.execute(
        update(ApiKey)
        .where(ApiKey.tenant_id == tenant_id, ApiKey.revoked_at.is_(None))
        .values(revoked_at=now)
        .returning(ApiKey.id)
    )
    return len(result.all())


async def write_last_used(session: AsyncSession, used: Mapping[str, datetime]) -> None:
    """Moves `last_used_at` forward, never back (several api processes write).

    Of any tenant: for the keys that were used, whoever they belong to.
    """
    for key_id, at in sorted(used.items()):
        await session.execute(
            update(ApiKey)
            .where(ApiKey.id == key_id)
            .where((ApiKey.last_used_at.is_(None)) | (ApiKey.last_used_at < at))
            .values(last_used_at=at)
        )


async def write_hash(
    session: AsyncSession, key_id: str, *, old_version: int, digest: str, version: int
) -> None:
    """Re-hashes a key under a newer root secret, unless somebody already did.

    Of any tenant: for a key that has just been verified.
    """
    await session.execute(
        update(ApiKey)
        .where(ApiKey.id == key_id, ApiKey.hash_version == old_version)
        .values(secret_hash=digest, hash_version=version)
    )


async def count_by_version(session: AsyncSession, now: datetime) -> dict[int, int]:
    """Keys that may still be used, by the version of the root secret that hashed them.

    Of any tenant: for the end of a rotation of the root secret.
    """
    rows = await session.execute(
        select(ApiKey.hash_version, func.count())
        .where(ApiKey.revoked_at.is_(None))
        .where((ApiKey.expires_at.is_(None)) | (ApiKey.expires_at > now))
        .where((ApiKey.revoke_at.is_(None)) | (ApiKey.revoke_at > now))
        .group_by(ApiKey.hash_version)
    )
    return {row[0]: row[1] for row in rows}
