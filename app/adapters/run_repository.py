"""The SQL of validation runs: a queue with leases in two tables."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import and_, delete, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters import states
from app.adapters.models import Adapter, AdapterVersion, Check, ValidationRun
from app.adapters.repository import affected

QUEUED = "queued"
RUNNING = "running"
DONE = "done"
FAILED = "failed"
CANCELLED = "cancelled"
OPEN = (QUEUED, RUNNING)


async def open_run(session: AsyncSession, version_id: str) -> ValidationRun | None:
    """The one run of the version that is queued or running.

    By its parent: the version was found before.
    """
    rows = await session.scalars(
        select(ValidationRun).where(
            ValidationRun.version_id == version_id, ValidationRun.state.in_(OPEN)
        )
    )
    return rows.first()


async def latest_runs(
    session: AsyncSession, version_ids: Iterable[str]
) -> dict[str, ValidationRun]:
    """The newest run of each version. By its parent: the versions were found before."""
    rows = await session.scalars(
        select(ValidationRun)
        .where(ValidationRun.version_id.in_(list(version_ids)))
        .order_by(ValidationRun.id)
    )
    return {run.version_id: run for run in rows}


async def page_newest(
    session: AsyncSession, *, state: str | None, after: str | None, limit: int
) -> Sequence[tuple[ValidationRun, AdapterVersion, Adapter]]:
    """The newest run of each version, newest first. Of any tenant: for the operator."""
    newest = select(func.max(ValidationRun.id)).group_by(ValidationRun.version_id)
    query = (
        select(ValidationRun, AdapterVersion, Adapter)
        .join(AdapterVersion, AdapterVersion.id == ValidationRun.version_id)
        .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
        .where(ValidationRun.id.in_(newest))
    )
    if state is not None:
        query = query.where(ValidationRun.state == state)
    if after is not None:
        query = query.where(ValidationRun.id < after)
    rows = await session.execute(query.order_by(ValidationRun.id.desc()).limit(limit))
    return [(row[0], row[1], row[2]) for row in rows]


async def count_open(session: AsyncSession) -> dict[str, int]:
    """Runs that wait and that run, versions that failed, versions due on a new base model.

    Of any tenant: for the operator and the metrics.
    """
    runs = await session.execute(
        select(ValidationRun.state, func.count())
        .where(ValidationRun.state.in_(OPEN))
        .group_by(ValidationRun.state)
    )
    counts = {QUEUED: 0, RUNNING: 0} | {str(row[0]): int(row[1]) for row in runs}
    moved = and_(
        AdapterVersion.code == "base_changed",
        AdapterVersion.state.in_((states.UPLOADED, states.VALIDATING)),
    )
    failed = AdapterVersion.state == states.FAILED
    row = (
        await session.execute(
            select(func.count().filter(failed), func.count().filter(moved))
            .select_from(AdapterVersion)
            .where(or_(failed, moved))
        )
    ).one()
    return counts | {"failed": row[0], "base_changed": row[1]}


async def claim(
    session: AsyncSession,
    run_id: str,
    *,
    owner: str,
    now: datetime,
    lease_until: datetime,
    max_attempts: int,
) -> bool:
    """Takes the run if it waits or its lease has run out, and counts the attempt.

    Of any tenant: for the worker, which has only the id.
    """
    result = await session.execute(
        update(ValidationRun)
        .where(
            ValidationRun.id == run_id,
            ValidationRun.attempts < max_attempts,
            or_(
                and_(
                    ValidationRun.state == QUEUED,
                    or_(ValidationRun.not_before.is_(None), ValidationRun.not_before <= now),
                ),
                and_(ValidationRun.state == RUNNING, ValidationRun.lease_until < now),
            ),
        )
        .values(
            state=RUNNING,
            owner=owner,
            lease_until=lease_until,
            attempts=ValidationRun.attempts + 1,
            started_at=now,
        )
        .execution_options(synchronize_session="fetch")
    )
    return affected(result) == 1


async def change_held(session: AsyncSession, run_id: str, holder: str, **values: Any) -> bool:
    """Changes a run that `holder` still holds; False when somebody else has taken it over.

    Of any tenant: for the worker that holds the run.
    """
    result = await session.execute(
        update(ValidationRun)
        .where(
            ValidationRun.id == run_id,
            ValidationRun.state == RUNNING,
            ValidationRun.owner == holder,
        )
        .values(**values)
        .execution_options(synchronize_session="fetch")
    )
    return affected(result) == 1


async def close_abandoned(
    session: AsyncSession, run_id: str, *, now: datetime, code: str, message: str
) -> bool:
    """Marks a run failed that nobody holds any more; False when somebody has taken it up.

    Of any tenant: for the sweep.
    """
    result = await session.execute(
        update(ValidationRun)
        .where(
            ValidationRun.id == run_id,
            or_(
                ValidationRun.state == QUEUED,
                and_(ValidationRun.state == RUNNING, ValidationRun.lease_until < now),
            ),
        )
        .values(state=FAILED, finished_at=now, lease_until=None, code=code, message=message)
        .execution_options(synchronize_session="fetch")
    )
    return affected(result) == 1


async def cancel_open(session: AsyncSession, version_ids: Iterable[str], now: datetime) -> None:
    """By its parent: the versions are being erased."""
    await session.execute(
        update(ValidationRun)
        .where(ValidationRun.version_id.in_(list(version_ids)), ValidationRun.state.in_(OPEN))
        .values(state=CANCELLED, finished_at=now, lease_until=None)
        .execution_options(synchronize_session="fetch")
    )


async def due(
    session: AsyncSession, *, now: datetime, sent_before: datetime, limit: int
) -> Sequence[ValidationRun]:
    """Runs that nobody works on: unsent or sent long ago, or left behind with an expired lease.

    Of any tenant: for the sweep.
    """
    waiting = and_(
        ValidationRun.state == QUEUED,
        or_(ValidationRun.not_before.is_(None), ValidationRun.not_before <= now),
        or_(ValidationRun.sent_at.is_(None), ValidationRun.sent_at < sent_before),
    )
    abandoned = and_(ValidationRun.state == RUNNING, ValidationRun.lease_until < now)
    rows = await session.scalars(
        select(ValidationRun)
        .where(or_(waiting, abandoned))
        .order_by(ValidationRun.created_at, ValidationRun.id)
        .limit(limit)
    )
    return rows.all()


async def set_sent(session: AsyncSession, run_ids: Iterable[str], at: datetime | None) -> None:
    """Of any tenant: for whoever sends tasks."""
    await session.execute(
        update(ValidationRun)
        .where(ValidationRun.id.in_(list(run_ids)))
        .values(sent_at=at)
        .execution_options(synchronize_session="fetch")
    )


async def checks_of(session: AsyncSession, run_ids: Iterable[str]) -> Sequence[Check]:
    """By its parent: the runs were found before."""
    rows = await session.scalars(
        select(Check).where(Check.run_id.in_(list(run_ids))).order_by(Check.run_id, Check.position)
    )
    return rows.all()


async def drop_checks(session: AsyncSession, run_id: str) -> None:
    """A new attempt begins its report anew. By its parent: the run is held by the worker."""
    await session.execute(delete(Check).where(Check.run_id == run_id))
