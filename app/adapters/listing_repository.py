"""SQL of the adapters as a table: each with its newest version."""

from collections.abc import Collection, Mapping
from datetime import datetime

from sqlalchemy import and_, exists, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters import states
from app.adapters.models import Adapter, AdapterVersion, Alias
from app.adapters.names import LIVE
from app.table_repository import read_table
from app.tables import Table, TableQuery

_READY = exists().where(
    AdapterVersion.adapter_id == Adapter.id, AdapterVersion.state == states.READY
)
"""That an adapter has something to call; one that was erased has nothing."""


async def table(
    session: AsyncSession, wanted: TableQuery, *, tenant_id: str, state: str | None
) -> Table[tuple[Adapter, AdapterVersion | None]]:
    """Live adapters with their newest version; `state`: only those whose newest has it."""
    newest = (
        select(AdapterVersion.adapter_id, func.max(AdapterVersion.number).label("number"))
        .where(AdapterVersion.tenant_id == tenant_id, AdapterVersion.state != states.ERASED)
        .group_by(AdapterVersion.adapter_id)
        .subquery()
    )
    query = (
        select(Adapter, AdapterVersion)
        .outerjoin(newest, newest.c.adapter_id == Adapter.id)
        .outerjoin(
            AdapterVersion,
            and_(
                AdapterVersion.adapter_id == Adapter.id,
                AdapterVersion.number == newest.c.number,
            ),
        )
        .where(Adapter.tenant_id == tenant_id, Adapter.erased_at.is_(None))
    )
    if state is not None:
        query = query.where(AdapterVersion.state == state)
    return await read_table(
        session,
        query,
        wanted,
        searched=[Adapter.name, Adapter.id],
        sorted_by={
            "name": Adapter.name,
            "state": AdapterVersion.state,
            "rank": AdapterVersion.rank,
            "size": AdapterVersion.config_bytes + AdapterVersion.weights_bytes,
            "uploaded": AdapterVersion.created_at,
            "last_used": Adapter.last_used_at,
            "id": Adapter.id,
        },
        default="-id",
    )


async def names(session: AsyncSession, tenant_id: str, search: str, limit: int) -> list[str]:
    """Names of adapters with a ready version that hold `search`, those that begin with it first."""
    begins = Adapter.name.istartswith(search, autoescape=True)
    rows = await session.scalars(
        select(Adapter.name)
        .where(
            Adapter.tenant_id == tenant_id,
            _READY,
            Adapter.name.icontains(search, autoescape=True),
        )
        .order_by(begins.desc(), Adapter.name)
        .limit(limit)
    )
    return list(rows)


async def newest_live(session: AsyncSession, tenant_id: str) -> str | None:
    """The name of the adapter with a ready version whose alias `live` was written last."""
    name: str | None = await session.scalar(
        select(Adapter.name)
        .join(Alias, Alias.adapter_id == Adapter.id)
        .where(Alias.tenant_id == tenant_id, Alias.name == LIVE, _READY)
        .order_by(Alias.updated_at.desc(), Adapter.name)
        .limit(1)
    )
    return name


async def names_of(
    session: AsyncSession, tenant_id: str, adapter_ids: Collection[str]
) -> dict[str, str]:
    """id -> name, of erased ones too: the ledger still speaks of them."""
    rows = await session.execute(
        select(Adapter.id, Adapter.name).where(
            Adapter.tenant_id == tenant_id, Adapter.id.in_(adapter_ids)
        )
    )
    return {row[0]: row[1] for row in rows}


async def write_last_used(
    session: AsyncSession, adapters: Mapping[str, datetime], versions: Mapping[str, datetime]
) -> None:
    """Moves `last_used_at` forward, never back (several api processes write).

    Of any tenant: for the adapters that were called, whoever they belong to.
    """
    for model, used in ((Adapter, adapters), (AdapterVersion, versions)):
        for id_, at in sorted(used.items()):
            await session.execute(
                update(model)
                .where(model.id == id_)
                .where((model.last_used_at.is_(None)) | (model.last_used_at < at))
                .values(last_used_at=at)
            )
