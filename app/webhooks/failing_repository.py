"""SQL of the endpoints that take nothing, of all tenants: for the operator's page of jobs."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.tenants.models import Tenant
from app.webhooks.models import WebhookDelivery, WebhookEndpoint
from app.webhooks.repository import DEAD, DISABLED, PENDING


@dataclass(frozen=True, slots=True)
class FailingEndpoint:
    """`pending` messages are still tried, `dead` ones were given up lately; `code`: how an attempt
    for one of them ended."""

    id: str
    tenant_id: str
    tenant_name: str
    url: str
    status: str
    disabled_reason: str | None
    failing_since: datetime | None
    last_success_at: datetime | None
    pending: int
    dead: int
    code: str | None


async def failing(session: AsyncSession, limit: int) -> Sequence[FailingEndpoint]:
    """Those that fail or were disabled for it, the longest first. Of any tenant: for the
    operator."""
    pending = func.count().filter(WebhookDelivery.state == PENDING)
    dead = func.count().filter(WebhookDelivery.state == DEAD)
    code = func.max(WebhookDelivery.code).filter(WebhookDelivery.state.in_((PENDING, DEAD)))
    rows = await session.execute(
        select(WebhookEndpoint, Tenant.name, pending, dead, code)
        .join(Tenant, Tenant.id == WebhookEndpoint.tenant_id)
        .outerjoin(WebhookDelivery, WebhookDelivery.endpoint_id == WebhookEndpoint.id)
        .where(
            or_(
                WebhookEndpoint.failing_since.is_not(None),
                (WebhookEndpoint.status == DISABLED)
                & (WebhookEndpoint.disabled_reason != "by hand"),
            )
        )
        .group_by(WebhookEndpoint.id, Tenant.name)
        .order_by(WebhookEndpoint.failing_since.asc().nulls_last(), WebhookEndpoint.id)
        .limit(limit)
    )
    return [
        FailingEndpoint(
            id=row.id,
            tenant_id=row.tenant_id,
            tenant_name=name,
            url=row.url,
            status=row.status,
            disabled_reason=row.disabled_reason,
            failing_since=row.failing_since,
            last_success_at=row.last_success_at,
            pending=waiting,
            dead=given_up,
            code=why,
        )
        for row, name, waiting, given_up, why in rows
    ]
