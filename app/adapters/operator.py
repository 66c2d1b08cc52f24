"""What operators see and do across tenants."""

from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters import repository, run_repository, states, sweeps
from app.adapters.intake import open_run
from app.adapters.models import Adapter, AdapterVersion
from app.adapters.names import clip
from app.adapters.resources import Resources
from app.adapters.schemas import (
    OperatorAdapterList,
    OperatorAdapterObject,
    ValidationCounts,
    ValidationList,
    ValidationObject,
    VersionObject,
)
from app.adapters.service import describe_adapters, with_report
from app.adapters.views import unix
from app.audit import service as audit
from app.caller import Caller
from app.errors import Conflict, NotFound


async def list_adapters(
    session: AsyncSession, *, tenant_id: str | None, after: str | None, limit: int
) -> OperatorAdapterList:
    rows = await repository.page_all_adapters(
        session, tenant_id=tenant_id, after=after, limit=limit + 1
    )
    shown = rows[:limit]
    described = await describe_adapters(session, shown)
    data = [
        OperatorAdapterObject(tenant_id=row.tenant_id, **entry.model_dump())
        for row, entry in zip(shown, described, strict=True)
    ]
    return OperatorAdapterList(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=len(rows) > limit,
    )


async def list_validations(
    session: AsyncSession, *, state: str | None, after: str | None, limit: int
) -> ValidationList:
    """Where validations stand. A failed one is tried again with `validate_again`."""
    data, has_more = await page_validations(session, state=state, after=after, limit=limit)
    return ValidationList(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=has_more,
        counts=await count_validations(session),
    )


async def page_validations(
    session: AsyncSession, *, state: str | None, after: str | None = None, limit: int
) -> tuple[list[ValidationObject], bool]:
    """The newest run of each version, newest first; whether there are more."""
    rows = await run_repository.page_newest(session, state=state, after=after, limit=limit + 1)
    data = [
        ValidationObject(
            id=run.id,
            tenant_id=run.tenant_id,
            adapter=adapter.name,
            version=version.number,
            version_id=version.id,
            version_state=version.state,
            version_code=version.code,
            state=run.state,
            attempts=run.attempts,
            code=run.code,
            message=run.message,
            created_at=unix(run.created_at),
            started_at=None if run.started_at is None else unix(run.started_at),
            finished_at=None if run.finished_at is None else unix(run.finished_at),
            lease_until=None if run.lease_until is None else unix(run.lease_until),
        )
        for run, version, adapter in rows[:limit]
    ]
    return data, len(rows) > limit


async def count_validations(session: AsyncSession) -> ValidationCounts:
    """How many wait, run and have failed, of all tenants."""
    return ValidationCounts(**await run_repository.count_open(session))


async def get_version(session: AsyncSession, version_id: str) -> VersionObject:
    adapter, version = await _find(session, version_id)
    return await with_report(session, adapter, version)


async def validate_again(resources: Resources, caller: Caller, version_id: str) -> VersionObject:
    """Gives a failed version another run. Raises Conflict for one in any other state."""
    async with resources.db.transaction() as session:
        adapter, version = await _find(session, version_id)
        moved = await repository.move(
            session,
            version_id,
            states.UPLOADED,
            frm=states.FAILED,
            now=resources.clock.now(),
            code=None,
            reason=None,
        )
        if not moved:
            raise Conflict(
                f"The version is {version.state}; only a failed one can be validated again.",
                code="version_not_failed",
            )
        await session.refresh(version)
        run = open_run(session, version, resources)
        await audit.record(
            session,
            actor=caller,
            action="adapter.validate_again",
            target=version_id,
            tenant_id=version.tenant_id,
        )
        view = await with_report(session, adapter, version)
    await sweeps.send(resources, run.id, version_id)
    return view


async def _find(session: AsyncSession, version_id: str) -> tuple[Adapter, AdapterVersion]:
    version = await repository.version_by_id(session, version_id)
    if version is None:
        raise NotFound(f"There is no version {clip(version_id)!r}.", code="version_not_found")
    return await repository.adapter_of(session, version), version
