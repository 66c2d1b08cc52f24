"""The outbox: what happened and whom to tell are written in the transaction in which it happened.

emit()           in that transaction; nothing is sent from here
deliver_soon()   after it: hints for workers, so that nobody waits for the next sweep
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final, Literal

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters.resources import QueueUnavailable, TaskQueue
from app.db import Database
from app.ids import new_id
from app.webhooks import repository
from app.webhooks.models import WebhookDelivery, WebhookEndpoint, WebhookEvent

log = structlog.get_logger(__name__)

DELIVER_TASK = "webhooks.deliver"
VERSION_READY: Final = "version.ready"
VERSION_REJECTED: Final = "version.rejected"
VERSION_FAILED: Final = "version.failed"
QUOTA_THRESHOLD: Final = "quota.threshold"
LIMITS_DECIDED: Final = "limits.decided"
TEST: Final = "webhook.test"
EventType = Literal[
    "version.ready", "version.rejected", "version.failed", "quota.threshold", "limits.decided"
]
"""What an endpoint may ask to be told."""
HINTS = 20


async def emit(
    session: AsyncSession,
    *,
    tenant_id: str,
    type_: str,
    data: Mapping[str, Any],
    now: datetime,
    give_up_s: float,
    once: str | None = None,
) -> None:
    """Adds an event with a delivery to each of the tenant's endpoints that asked for it.

    `once` names what may be told once; a caller that gives it holds the tenant's lock. `data`
    holds plain JSON values and never message content.
    """
    endpoints = [
        endpoint
        for endpoint in await repository.endpoints_of(session, tenant_id)
        if endpoint.status == repository.ENABLED and type_ in endpoint.events
    ]
    if not endpoints or (once is not None and await repository.happened(session, once)):
        return
    event = await _add_event(session, tenant_id, type_, data, now, once)
    for endpoint in endpoints:
        add_delivery(session, event, endpoint, now, give_up_s)
    await session.flush()


async def emit_to(
    session: AsyncSession,
    endpoint: WebhookEndpoint,
    *,
    type_: str,
    data: Mapping[str, Any],
    now: datetime,
    give_up_s: float,
) -> WebhookDelivery:
    """An event for one endpoint alone."""
    event = await _add_event(session, endpoint.tenant_id, type_, data, now, None)
    delivery = add_delivery(session, event, endpoint, now, give_up_s)
    await session.flush()
    return delivery


async def _add_event(
    session: AsyncSession,
    tenant_id: str,
    type_: str,
    data: Mapping[str, Any],
    now: datetime,
    once: str | None,
) -> WebhookEvent:
    event = WebhookEvent(
        id=new_id("evt"),
        tenant_id=tenant_id,
        type=type_,
        data=dict(data),
        once=once,
        created_at=now,
    )
    session.add(event)
    await session.flush()
    return event


def add_delivery(
    session: AsyncSession,
    event: WebhookEvent,
    endpoint: WebhookEndpoint,
    now: datetime,
    give_up_s: float,
) -> WebhookDelivery:
    delivery = WebhookDelivery(
        id=new_id("whd"),
        endpoint_id=endpoint.id,
        event_id=event.id,
        tenant_id=endpoint.tenant_id,
        type=event.type,
        state=repository.PENDING,
        attempts=0,
        next_attempt_at=now,
        give_up_at=now + timedelta(seconds=give_up_s),
        attempt_log=[],
        created_at=now,
    )
    session.add(delivery)
    return delivery


async def deliver_soon(db: Database, queue: TaskQueue, tenant_id: str, now: datetime) -> int:
    """Sends hints for a tenant's new deliveries; how many. What is left the sweep finds.

    Endpoints that fail get none: they must not keep workers waiting.
    """
    async with db.reading() as session:
        waiting = await repository.first_attempts(session, tenant_id, now, HINTS)
    try:
        for delivery_id in waiting:
            await queue.send(DELIVER_TASK, delivery_id)
    except QueueUnavailable as error:
        log.warning("the task queue is away", error=str(error))
        return 0
    return len(waiting)
