"""Reading a tenant's adapters. Callers never name a tenant."""

from collections.abc import Sequence

from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters import repository, run_repository
from app.adapters.models import Adapter, AdapterVersion
from app.adapters.names import NAME, clip
from app.adapters.resolution import (
    ListedModel,
    OutOfScope,
    ResolvedModel,
    list_models,
)
from app.adapters.schemas import AdapterList, AdapterObject, VersionObject
from app.adapters.views import adapter_object, report_object, version_object
from app.caller import Caller
from app.errors import Forbidden, NotFound

__all__ = ["ListedModel", "ResolvedModel", "list_models"]


def adapter_not_found(name: str) -> NotFound:
    """The one answer for unknown, foreign and erased adapters."""
    return NotFound(
        f"There is no adapter {clip(name)!r}; GET /v1/adapters lists yours.",
        code="adapter_not_found",
        param="name",
    )


class AdapterOutOfScope(OutOfScope):
    """`OutOfScope` for a route about adapters: answers as if there were no such adapter."""

    def __init__(self, name: str, adapter_id: str) -> None:
        super().__init__(name, adapter_id)
        missing = adapter_not_found(name)
        self.message, self.code, self.param = missing.message, missing.code, missing.param


def version_not_found(name: str, number: int) -> NotFound:
    return NotFound(
        f"The adapter {clip(name)!r} has no version {number}.",
        code="version_not_found",
        param="version",
    )


def require_writer(caller: Caller) -> None:
    """Viewers read."""
    if caller.role == "tenant_viewer":
        raise Forbidden(
            "Viewers cannot change adapters; ask an admin of your tenant.", code="read_only_role"
        )


async def find_adapter(session: AsyncSession, caller: Caller, name: str) -> Adapter:
    """The caller's adapter of that name. Raises NotFound, OutOfScope among them."""
    adapter = None
    if NAME.fullmatch(name):
        adapter = await repository.live_adapter(session, caller.tenant_id, name)
    if adapter is None:
        raise adapter_not_found(name)
    if not caller.may_call(adapter.name):
        raise AdapterOutOfScope(name, adapter.id)
    return adapter


async def find_version(
    session: AsyncSession, caller: Caller, name: str, number: int
) -> tuple[Adapter, AdapterVersion]:
    adapter = await find_adapter(session, caller, name)
    version = None
    if 1 <= number < 2**31:
        version = await repository.version_numbered(session, adapter.id, number)
    if version is None:
        raise version_not_found(name, number)
    return adapter, version


async def list_adapters(
    session: AsyncSession, caller: Caller, *, after: str | None = None, limit: int = 20
) -> AdapterList:
    """A page of the caller's adapters with their versions (without reports) and aliases."""
    rows = await repository.page_adapters(
        session, caller.tenant_id, after=after, limit=limit + 1, names=caller.adapter_scope
    )
    data = await describe_adapters(session, rows[:limit])
    return AdapterList(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=len(rows) > limit,
    )


async def describe_adapters(session: AsyncSession, rows: Sequence[Adapter]) -> list[AdapterObject]:
    ids = [adapter.id for adapter in rows]
    versions = await repository.versions_of(session, ids)
    aliases = await repository.aliases_of(session, ids)
    return [adapter_object(adapter, versions, aliases) for adapter in rows]


async def get_adapter(session: AsyncSession, caller: Caller, name: str) -> AdapterObject:
    adapter = await find_adapter(session, caller, name)
    return (await describe_adapters(session, [adapter]))[0]


async def get_version(
    session: AsyncSession, caller: Caller, name: str, number: int
) -> VersionObject:
    """The version with the report of its newest validation run."""
    adapter, version = await find_version(session, caller, name, number)
    return await with_report(session, adapter, version)


async def with_report(
    session: AsyncSession, adapter: Adapter, version: AdapterVersion
) -> VersionObject:
    run = (await run_repository.latest_runs(session, [version.id])).get(version.id)
    if run is None:
        return version_object(adapter, version)
    checks = await run_repository.checks_of(session, [run.id])
    return version_object(adapter, version, report_object(run, checks))
