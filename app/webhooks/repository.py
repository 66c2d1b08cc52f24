"""SQL of webhooks. Every tenant-facing query takes the tenant's id."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

from sqlalchemy import CursorResult, case, delete, exists, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.tenants.models import Tenant
from app.webhooks.models import WebhookDelivery, WebhookEndpoint, WebhookEvent

PENDING = "pending"
DELIVERED = "delivered"
DEAD = "dead"
ENABLED = "enabled"
DISABLED = "disabled"


@dataclass(frozen=True, slots=True)
class Due:
    """A delivery whose time has come."""

    delivery_id: str
    tenant_id: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """Deliveries that wait: how many, when the oldest's event was, and the earliest due attempt
    that no worker holds."""

    count: int
    oldest: datetime | None
    due_since: datetime | None


async def lock_tenant(session: AsyncSession, tenant_id: str) -> None:
    """Makes counting a tenant's endpoints and adding one a single step."""
    await session.execute(select(Tenant.id).where(Tenant.id == tenant_id).with_for_update())


async def lock_endpoint(session: AsyncSession, endpoint_id: str) -> None:
    """Taken before any delivery of it is changed, so that no two transactions wait in a ring.

    Of any tenant: for the worker, which has the endpoint of a delivery.
    """
    await session.execute(
        select(WebhookEndpoint.id)
        .where(WebhookEndpoint.id == endpoint_id)
        .with_for_update(key_share=True)
    )


# --------------------------------------------------------------------------- endpoints


async def endpoint(
    session: AsyncSession, endpoint_id: str, tenant_id: str | None
) -> WebhookEndpoint | None:
    """`tenant_id=None`: of any tenant, for workers and operators."""
    query = select(WebhookEndpoint).where(WebhookEndpoint.id == endpoint_id)
    if tenant_id is not None:
        query = query.where(WebhookEndpoint.tenant_id == tenant_id)
    return (await session.scalars(query)).first()


async def endpoints_of(session: AsyncSession, tenant_id: str) -> Sequence[WebhookEndpoint]:
    rows = await session.scalars(
        select(WebhookEndpoint)
        .where(WebhookEndpoint.tenant_id == tenant_id)
        .order_by(WebhookEndpoint.id)
    )
    return rows.all()


async def page_endpoints(
    session: AsyncSession, *, tenant_id: str | None, after: str | None, limit: int
) -> Sequence[WebhookEndpoint]:
    """Newest first, of one tenant or of all: for the operator."""
    query = select(WebhookEndpoint)
    if tenant_id is not None:
        query = query.where(WebhookEndpoint.tenant_id == tenant_id)
    if after is not None:
        query = query.where(WebhookEndpoint.id < after)
    return (await session.scalars(query.order_by(WebhookEndpoint.id.desc()).limit(limit))).all()


async def delete_endpoint(session: AsyncSession, endpoint_id: str) -> None:
    """With its deliveries. By its parent: the caller found the endpoint."""
    await session.execute(delete(WebhookDelivery).where(WebhookDelivery.endpoint_id == endpoint_id))
    await session.execute(delete(WebhookEndpoint).where(WebhookEndpoint.id == endpoint_id))


async def note_success(session: AsyncSession, endpoint_id: str, now: datetime) -> None:
    """Of any tenant: for the worker, which has sent something to it."""
    await session.execute(
        update(WebhookEndpoint)
        .where(WebhookEndpoint.id == endpoint_id)
        .values(failing_since=None, last_success_at=now)
        .execution_options(synchronize_session=False)
    )


async def note_failure(session: AsyncSession, endpoint_id: str, now: datetime) -> None:
    """The first failure after a success begins the time that it has been failing for.

    Of any tenant: for the worker, which has tried to send something to it.
    """
    await session.execute(
        update(WebhookEndpoint)
        .where(WebhookEndpoint.id == endpoint_id, WebhookEndpoint.failing_since.is_(None))
        .values(failing_since=now)
        .execution_options(synchronize_session=False)
    )


async def disable(session: AsyncSession, endpoint_id: str, reason: str, now: datetime) -> bool:
    """False when it was disabled already. What is still to be sent to it is dead.

    By its parent: the caller found the endpoint.
    """
    result = await session.execute(
        update(WebhookEndpoint)
        .where(WebhookEndpoint.id == endpoint_id, WebhookEndpoint.status == ENABLED)
        .values(status=DISABLED, disabled_reason=reason, updated_at=now)
        .execution_options(synchronize_session="fetch")
    )
    await bury(session, endpoint_id, now)
    return _affected(result) == 1


async def bury(session: AsyncSession, endpoint_id: str, now: datetime) -> None:
    """What is still to be sent to a disabled endpoint is dead.

    By its parent: the caller found the endpoint.
    """
    await session.execute(
        update(WebhookDelivery)
        .where(WebhookDelivery.endpoint_id == endpoint_id, WebhookDelivery.state == PENDING)
        .values(state=DEAD, code="endpoint_disabled", finished_at=now, lease_until=None)
        .execution_options(synchronize_session=False)
    )


async def count_by_secret_version(session: AsyncSession, now: datetime) -> dict[int, int]:
    """How many secrets each version of the root secret still seals.

    Of any tenant: a rotation is the platform's.
    """
    counts: dict[int, int] = {}
    current = await session.execute(
        select(WebhookEndpoint.secret_version, func.count()).group_by(
            WebhookEndpoint.secret_version
        )
    )
    previous = await session.execute(
        select(WebhookEndpoint.previous_version, func.count())
        .where(WebhookEndpoint.previous_until > now)
        .group_by(WebhookEndpoint.previous_version)
    )
    for row in [*current, *previous]:
        version, count = row
        if version is not None:
            counts[version] = counts.get(version, 0) + count
    return counts


async def sealed_by_others(
    session: AsyncSession, version: int, limit: int
) -> Sequence[WebhookEndpoint]:
    """Endpoints with a secret that another version of the root secret seals.

    Of any tenant: a rotation is the platform's.
    """
    rows = await session.scalars(
        select(WebhookEndpoint)
        .where(
            or_(
                WebhookEndpoint.secret_version != version,
                WebhookEndpoint.previous_version != version,
            )
        )
        .order_by(WebhookEndpoint.id)
        .limit(limit)
    )
    return rows.all()


async def tenants_that_listen(session: AsyncSession, type_: str) -> list[str]:
    """Ids of tenants with an endpoint that asked for that event.

    Of any tenant: for the sweep, which looks after each of them.
    """
    rows = await session.execute(
        select(WebhookEndpoint.tenant_id, WebhookEndpoint.events)
        .where(WebhookEndpoint.status == ENABLED)
        .order_by(WebhookEndpoint.tenant_id)
    )
    return list(dict.fromkeys(tenant_id for tenant_id, events in rows if type_ in events))


# --------------------------------------------------------------------------- events


async def happened(session: AsyncSession, once: str) -> bool:
    """Whether an event that may be told once was told. Of any tenant: `once` names whose it is."""
    return bool(await session.scalar(select(exists().where(WebhookEvent.once == once))))


async def event(session: AsyncSession, event_id: str) -> WebhookEvent:
    """By its parent: the delivery of it was found."""
    return await session.get_one(WebhookEvent, event_id)


# --------------------------------------------------------------------------- deliveries


async def delivery(
    session: AsyncSession, delivery_id: str, endpoint_id: str | None = None
) -> WebhookDelivery | None:
    """By its parent: a caller's endpoint that was found; None for the worker."""
    query = select(WebhookDelivery).where(WebhookDelivery.id == delivery_id)
    if endpoint_id is not None:
        query = query.where(WebhookDelivery.endpoint_id == endpoint_id)
    return (await session.scalars(query)).first()


async def page_deliveries(
    session: AsyncSession,
    *,
    endpoint_id: str | None,
    tenant_id: str | None,
    state: str | None,
    after: str | None,
    limit: int,
) -> Sequence[WebhookDelivery]:
    """Newest first."""
    query = select(WebhookDelivery)
    for column, value in (
        (WebhookDelivery.endpoint_id, endpoint_id),
        (WebhookDelivery.tenant_id, tenant_id),
        (WebhookDelivery.state, state),
    ):
        if value is not None:
            query = query.where(column == value)
    if after is not None:
        query = query.where(WebhookDelivery.id < after)
    return (await session.scalars(query.order_by(WebhookDelivery.id.desc()).limit(limit))).all()


async def count_pending(session: AsyncSession, endpoint_id: str) -> int:
    """By its parent: the caller found the endpoint."""
    count = await session.scalar(
        select(func.count())
        .select_from(WebhookDelivery)
        .where(WebhookDelivery.endpoint_id == endpoint_id, WebhookDelivery.state == PENDING)
    )
    return count or 0


async def due(session: AsyncSession, now: datetime, limit: int) -> Sequence[Due]:
    """The longest due first; those that a worker holds are left out.

    Of any tenant: for the sweep, which shares itself out among them.
    """
    rows = await session.execute(
        select(WebhookDelivery.id, WebhookDelivery.tenant_id)
        .where(
            WebhookDelivery.state == PENDING,
            WebhookDelivery.next_attempt_at <= now,
            _free(now),
        )
        .order_by(WebhookDelivery.next_attempt_at, WebhookDelivery.id)
        .limit(limit)
    )
    return [Due(row[0], row[1]) for row in rows]


async def waiting(session: AsyncSession, now: datetime) -> Waiting:
    """Of any tenant: for the platform's metrics."""
    due_at = case((_free(now), WebhookDelivery.next_attempt_at))
    row = (
        await session.execute(
            select(func.count(), func.min(WebhookDelivery.created_at), func.min(due_at)).where(
                WebhookDelivery.state == PENDING
            )
        )
    ).one()
    return Waiting(row[0], row[1], row[2])


async def first_attempts(
    session: AsyncSession, tenant_id: str, now: datetime, limit: int
) -> Sequence[str]:
    """Deliveries of a tenant that nobody has tried yet, to endpoints that do not fail."""
    rows = await session.scalars(
        select(WebhookDelivery.id)
        .join(WebhookEndpoint, WebhookEndpoint.id == WebhookDelivery.endpoint_id)
        .where(
            WebhookDelivery.tenant_id == tenant_id,
            WebhookDelivery.state == PENDING,
            WebhookDelivery.attempts == 0,
            WebhookDelivery.next_attempt_at <= now,
            WebhookEndpoint.failing_since.is_(None),
        )
        .order_by(WebhookDelivery.id.desc())
        .limit(limit)
    )
    return rows.all()


async def claim(
    session: AsyncSession, delivery_id: str, now: datetime, lease_until: datetime
) -> int | None:
    """Takes the delivery for one attempt; its number, or None when it is not to be had.

    Of any tenant: for the worker, which has only the id.
    """
    result = await session.execute(
        update(WebhookDelivery)
        .where(
            WebhookDelivery.id == delivery_id,
            WebhookDelivery.state == PENDING,
            WebhookDelivery.next_attempt_at <= now,
            _free(now),
        )
        .values(lease_until=lease_until, attempts=WebhookDelivery.attempts + 1)
        .returning(WebhookDelivery.attempts)
        .execution_options(synchronize_session=False)
    )
    row = result.first()
    return None if row is None else int(row[0])


async def conclude(session: AsyncSession, delivery_id: str, attempt: int, **values: Any) -> bool:
    """Writes how an attempt ended, unless a later one has begun.

    Of any tenant: for the worker, which has made the attempt.
    """
    result = await session.execute(
        update(WebhookDelivery)
        .where(
            WebhookDelivery.id == delivery_id,
            WebhookDelivery.state == PENDING,
            WebhookDelivery.attempts == attempt,
        )
        .values(lease_until=None, **values)
        .execution_options(synchronize_session=False)
    )
    return _affected(result) == 1


async def drop_finished(session: AsyncSession, before: datetime) -> int:
    """Deliveries that ended before then, and events that no delivery needs any more.

    Of any tenant: what is old goes everywhere.
    """
    dropped = await session.execute(
        delete(WebhookDelivery).where(WebhookDelivery.finished_at < before)
    )
    await session.execute(
        delete(WebhookEvent).where(
            WebhookEvent.created_at < before,
            ~exists().where(WebhookDelivery.event_id == WebhookEvent.id),
        )
    )
    return _affected(dropped)


async def erase_tenant(session: AsyncSession, tenant_id: str) -> int:
    """Everything of a tenant that is being deleted; how many endpoints it had."""
    await session.execute(
        select(WebhookEndpoint.id)
        .where(WebhookEndpoint.tenant_id == tenant_id)
        .order_by(WebhookEndpoint.id)
        .with_for_update()
    )
    await session.execute(delete(WebhookDelivery).where(WebhookDelivery.tenant_id == tenant_id))
    await session.execute(delete(WebhookEvent).where(WebhookEvent.tenant_id == tenant_id))
    gone = await session.execute(
        delete(WebhookEndpoint).where(WebhookEndpoint.tenant_id == tenant_id)
    )
    return _affected(gone)


def _free(now: datetime) -> Any:
    return or_(WebhookDelivery.lease_until.is_(None), WebhookDelivery.lease_until < now)


def _affected(result: Any) -> int:
    return cast("CursorResult[Any]", result).rowcount
