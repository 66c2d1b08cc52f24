"""All SQL of the adapters domain. Every tenant-facing query takes the tenant's id."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, cast

from sqlalchemy import CursorResult, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters import states
from app.adapters.models import (
    Adapter,
    AdapterVersion,
    Alias,
    AliasChange,
    BaseModel,
    Erasure,
    UploadKey,
)
from app.tenants.models import Tenant


async def lock_tenant(session: AsyncSession, tenant_id: str) -> bool:
    """Serialises uploads and erasures of one tenant until the transaction ends.

    A row lock on PostgreSQL; on SQLite every transaction already excludes other writers. False
    when the tenant is being deleted: nothing new may be added to it.
    """
    query = select(Tenant.deleted_at).where(Tenant.id == tenant_id).with_for_update()
    found = (await session.execute(query)).one_or_none()
    return found is not None and found[0] is None


async def tenant_with_salt(session: AsyncSession, salt: str) -> str | None:
    return await session.scalar(select(Tenant.id).where(Tenant.salt == salt))


# --------------------------------------------------------------------------- base models


async def base_models(session: AsyncSession) -> Sequence[BaseModel]:
    """The base models that engines have described, the latest seen first."""
    rows = await session.scalars(
        select(BaseModel).order_by(BaseModel.last_seen_at.desc(), BaseModel.base_digest)
    )
    return rows.all()


async def base_model(session: AsyncSession, digest: str) -> BaseModel | None:
    return await session.get(BaseModel, digest)


# --------------------------------------------------------------------------- adapters


async def live_adapter(session: AsyncSession, tenant_id: str, name: str) -> Adapter | None:
    rows = await session.scalars(
        select(Adapter).where(
            Adapter.tenant_id == tenant_id, Adapter.name == name, Adapter.erased_at.is_(None)
        )
    )
    return rows.first()


async def adapter_of(session: AsyncSession, version: AdapterVersion) -> Adapter:
    """The adapter, erased or not, that a version belongs to.

    By its parent: whoever holds the version may know its adapter.
    """
    return await session.get_one(Adapter, version.adapter_id)


async def page_adapters(
    session: AsyncSession,
    tenant_id: str,
    *,
    after: str | None,
    limit: int,
    names: Iterable[str] | None = None,
) -> Sequence[Adapter]:
    """Live adapters in the order of their ids (of their making), after the id `after`."""
    query = select(Adapter).where(Adapter.tenant_id == tenant_id, Adapter.erased_at.is_(None))
    if names is not None:
        query = query.where(Adapter.name.in_(sorted(names)))
    if after is not None:
        query = query.where(Adapter.id > after)
    return (await session.scalars(query.order_by(Adapter.id).limit(limit))).all()


async def page_all_adapters(
    session: AsyncSession,
    *,
    tenant_id: str | None,
    after: str | None,
    limit: int,
) -> Sequence[Adapter]:
    """Live adapters of one tenant or of all: for the operator."""
    query = select(Adapter).where(Adapter.erased_at.is_(None))
    if tenant_id is not None:
        query = query.where(Adapter.tenant_id == tenant_id)
    if after is not None:
        query = query.where(Adapter.id > after)
    return (await session.scalars(query.order_by(Adapter.id).limit(limit))).all()


async def count_adapters(session: AsyncSession, tenant_id: str) -> int:
    count = await session.scalar(
        select(func.count())
        .select_from(Adapter)
        .where(Adapter.tenant_id == tenant_id, Adapter.erased_at.is_(None))
    )
    return count or 0


# --------------------------------------------------------------------------- versions


async def version_by_id(session: AsyncSession, version_id: str) -> AdapterVersion | None:
    """Of any tenant: for the worker, which has only the id."""
    return await session.get(AdapterVersion, version_id)


async def version_numbered(
    session: AsyncSession, adapter_id: str, number: int
) -> AdapterVersion | None:
    """By its parent: the adapter was found by its tenant."""
    rows = await session.scalars(
        select(AdapterVersion).where(
            AdapterVersion.adapter_id == adapter_id,
            AdapterVersion.number == number,
            AdapterVersion.state != states.ERASED,
        )
    )
    return rows.first()


async def version_with_digest(
    session: AsyncSession, adapter_id: str, digest: str
) -> AdapterVersion | None:
    """By its parent: the adapter was found by its tenant."""
    rows = await session.scalars(
        select(AdapterVersion).where(
            AdapterVersion.adapter_id == adapter_id,
            AdapterVersion.digest == digest,
            AdapterVersion.state != states.ERASED,
        )
    )
    return rows.first()


async def versions_of(
    session: AsyncSession, adapter_ids: Iterable[str]
) -> Sequence[AdapterVersion]:
    """Versions that are not erased, by adapter and number.

    By its parent: the adapters were found by their tenant.
    """
    rows = await session.scalars(
        select(AdapterVersion)
        .where(
            AdapterVersion.adapter_id.in_(list(adapter_ids)),
            AdapterVersion.state != states.ERASED,
        )
        .order_by(AdapterVersion.adapter_id, AdapterVersion.number)
    )
    return rows.all()


async def ready_on(
    session: AsyncSession, base_digests: Iterable[str], limit: int
) -> Sequence[AdapterVersion]:
    """Ready versions that were validated against these bases, oldest first.

    Of any tenant: a base model is everybody's.
    """
    rows = await session.scalars(
        select(AdapterVersion)
        .where(
            AdapterVersion.state == states.READY,
            AdapterVersion.base_digest.in_(sorted(base_digests)),
        )
        .order_by(AdapterVersion.id)
        .limit(limit)
    )
    return rows.all()


async def last_number(session: AsyncSession, adapter_id: str) -> int:
    """The highest number ever given, erased versions included: numbers are not reused.

    By its parent: the adapter was found by its tenant.
    """
    number = await session.scalar(
        select(func.max(AdapterVersion.number)).where(AdapterVersion.adapter_id == adapter_id)
    )
    return number or 0


async def stored_bytes(session: AsyncSession, tenant_id: str) -> int:
    """Bytes in the store that the tenant answers for; content kept once counts once."""
    per_digest = (
        select(func.max(AdapterVersion.config_bytes + AdapterVersion.weights_bytes).label("nbytes"))
        .where(AdapterVersion.tenant_id == tenant_id, AdapterVersion.state != states.ERASED)
        .group_by(AdapterVersion.digest)
        .subquery()
    )
    total = await session.scalar(select(func.sum(per_digest.c.nbytes)))
    return int(total or 0)


async def others_with_digest(
    session: AsyncSession, tenant_id: str, digest: str, besides: Iterable[str]
) -> Sequence[AdapterVersion]:
    """The tenant's other versions with the same content, which the store keeps once."""
    rows = await session.scalars(
        select(AdapterVersion).where(
            AdapterVersion.tenant_id == tenant_id,
            AdapterVersion.digest == digest,
            AdapterVersion.state != states.ERASED,
            AdapterVersion.id.not_in(list(besides)),
        )
    )
    return rows.all()


async def move(
    session: AsyncSession,
    version_id: str,
    to: str,
    *,
    now: datetime,
    frm: str | None = None,
    **values: Any,
) -> bool:
    """Moves a version to state `to` if the state machine allows it from where the version is.

    A compare-and-set: of two deliveries that race, one gets True. `frm` narrows the source.

    By its parent: whoever moves a version has found it before.
    """
    allowed = states.sources(to) if frm is None else states.sources(to) & {frm}
    result = await session.execute(
        update(AdapterVersion)
        .where(AdapterVersion.id == version_id, AdapterVersion.state.in_(sorted(allowed)))
        .values(state=to, updated_at=now, **values)
        .execution_options(synchronize_session="fetch")
    )
    return affected(result) == 1


def affected(result: Any) -> int:
    return cast("CursorResult[Any]", result).rowcount


# --------------------------------------------------------------------------- aliases


async def alias(session: AsyncSession, adapter_id: str, name: str) -> Alias | None:
    """By its parent: the adapter was found by its tenant."""
    return await session.get(Alias, (adapter_id, name))


async def aliases_of(session: AsyncSession, adapter_ids: Iterable[str]) -> Sequence[Alias]:
    """By its parent: the adapters were found by their tenant."""
    rows = await session.scalars(
        select(Alias)
        .where(Alias.adapter_id.in_(list(adapter_ids)))
        .order_by(Alias.adapter_id, Alias.name)
    )
    return rows.all()


async def drop_aliases(session: AsyncSession, adapter_id: str) -> None:
    """With their history. By its parent: the adapter was found by its tenant."""
    await session.execute(delete(AliasChange).where(AliasChange.adapter_id == adapter_id))
    await session.execute(delete(Alias).where(Alias.adapter_id == adapter_id))


# --------------------------------------------------------------------------- uploads, erasures


async def upload_key(session: AsyncSession, tenant_id: str, key_hash: str) -> UploadKey | None:
    return await session.get(UploadKey, (tenant_id, key_hash))


async def drop_upload_keys_before(session: AsyncSession, before: datetime) -> int:
    """Of any tenant: for the sweep."""
    result = await session.execute(delete(UploadKey).where(UploadKey.created_at < before))
    return affected(result)


async def open_erasures(session: AsyncSession, limit: int) -> Sequence[Erasure]:
    """Receipts that an engine has yet to acknowledge, the longest untouched first.

    Of any tenant: for the sweep.
    """
    rows = await session.scalars(
        select(Erasure)
        .where(Erasure.complete.is_(False))
        .order_by(Erasure.updated_at, Erasure.id)
        .limit(limit)
    )
    return rows.all()


async def erasure(session: AsyncSession, erasure_id: str) -> Erasure:
    """Of any tenant: for whoever carries it on, which has only the id."""
    return await session.get_one(Erasure, erasure_id)


async def page_erasures(
    session: AsyncSession, tenant_id: str, *, after: str | None, limit: int
) -> Sequence[Erasure]:
    """A tenant's receipts, newest first."""
    query = select(Erasure).where(Erasure.tenant_id == tenant_id)
    if after is not None:
        query = query.where(Erasure.id < after)
    return (await session.scalars(query.order_by(Erasure.id.desc()).limit(limit))).all()


async def count_erasures(session: AsyncSession, tenant_id: str) -> tuple[int, int]:
    """(receipts, those of them that are not complete) of a tenant."""
    rows = await session.execute(
        select(Erasure.complete, func.count())
        .where(Erasure.tenant_id == tenant_id)
        .group_by(Erasure.complete)
    )
    counts: dict[bool, int] = {bool(row[0]): row[1] for row in rows}
    return sum(counts.values()), counts.get(False, 0)
