"""Reading a tenant's adapters, and moving their aliases. Callers never name a tenant."""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters import repository, run_repository, states
from app.adapters.aliases import check_weights
from app.adapters.models import Adapter, AdapterVersion, Alias
from app.adapters.names import NAME, alias_name, clip
from app.adapters.resolution import (
    ListedModel,
    OutOfScope,
    ResolvedModel,
    list_models,
    resolve_model,
)
from app.adapters.schemas import AdapterList, AdapterObject, AliasObject, VersionObject
from app.adapters.views import adapter_object, alias_object, report_object, version_object
from app.audit import service as audit
from app.caller import Caller
from app.errors import Conflict, Forbidden, NotFound

__all__ = ["ListedModel", "ResolvedModel", "list_models", "resolve_model"]


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


async def set_alias(
    session: AsyncSession,
    caller: Caller,
    name: str,
    alias: str,
    weights: Sequence[tuple[int, int]],
    now: datetime,
) -> AliasObject:
    """Points an alias at versions (number, percent); they must be ready. Returns it as it is now.

    From then on `live` stays where it was put.
    """
    require_writer(caller)
    alias_name(alias)
    check_weights(weights)
    adapter = await find_adapter(session, caller, name)
    await repository.lock_tenant(session, caller.tenant_id)
    targets = []
    numbers: dict[str, int] = {}
    for number, weight in weights:
        version = await repository.version_numbered(session, adapter.id, number)
        if version is None:
            raise version_not_found(name, number)
        if version.state != states.READY:
            raise Conflict(
                f"Version {number} of {clip(name)!r} is {version.state}; an alias may only point "
                "at versions that are ready.",
                code="version_not_ready",
                param="targets",
            )
        targets.append({"version_id": version.id, "weight": weight})
        numbers[version.id] = number
    row = await repository.alias(session, adapter.id, alias)
    before = None if row is None else [dict(target) for target in row.targets]
    if row is None:
        row = Alias(adapter_id=adapter.id, name=alias, tenant_id=caller.tenant_id)
        session.add(row)
    row.targets = targets
    row.by_hand = True
    row.updated_by = audit.actor_id(caller)
    row.updated_at = now
    await audit.record(
        session,
        actor=caller,
        action="adapter.alias",
        target=adapter.id,
        tenant_id=caller.tenant_id,
        detail={"alias": alias, "from": before, "to": targets},
    )
    return alias_object(adapter, row, numbers)
