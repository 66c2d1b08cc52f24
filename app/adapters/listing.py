"""A tenant's adapters as a table shows them: searched, sorted, in pages."""

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters import listing_repository, repository
from app.adapters.alias_schemas import AliasObject
from app.adapters.models import Adapter, AdapterVersion
from app.adapters.views import alias_object
from app.caller import Caller
from app.tables import Table, TableQuery


@dataclass(frozen=True, slots=True)
class AdapterRow:
    """One adapter; `newest` is None while it has no version that is kept."""

    adapter: Adapter
    newest: AdapterVersion | None
    aliases: list[AliasObject]


async def adapter_table(
    session: AsyncSession, caller: Caller, wanted: TableQuery, *, state: str | None = None
) -> Table[AdapterRow]:
    """Four statements however many adapters there are. Sorted by name, state, rank, size,
    uploaded or last_used."""
    found = await listing_repository.table(session, wanted, tenant_id=caller.tenant_id, state=state)
    ids = [adapter.id for adapter, _ in found.rows]
    numbers = {v.id: v.number for v in await repository.versions_of(session, ids)}
    aliases: dict[str, list[AliasObject]] = {id_: [] for id_ in ids}
    by_id = {adapter.id: adapter for adapter, _ in found.rows}
    for row in await repository.aliases_of(session, ids):
        aliases[row.adapter_id].append(alias_object(by_id[row.adapter_id], row, numbers))
    rows = [AdapterRow(adapter, newest, aliases[adapter.id]) for adapter, newest in found.rows]
    return Table(rows, found.total)


async def matching_names(
    session: AsyncSession, caller: Caller, search: str, limit: int
) -> list[str]:
    """Names to choose from while somebody types: of adapters with a ready version."""
    return await listing_repository.names(session, caller.tenant_id, search, limit)


async def newest_live(session: AsyncSession, caller: Caller) -> str | None:
    """The adapter whose alias `live` moved last; None where there is none."""
    return await listing_repository.newest_live(session, caller.tenant_id)


async def adapter_names(
    session: AsyncSession, caller: Caller, adapter_ids: Collection[str]
) -> dict[str, str]:
    """What the caller's adapters of these ids are or were called."""
    return await listing_repository.names_of(session, caller.tenant_id, adapter_ids)
