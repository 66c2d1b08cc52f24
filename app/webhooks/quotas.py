"""Tells tenants that the month's tokens run out: at 80 % and at 100 %, each once a month.

What closed calls have billed counts, as in `/v1/usage`; what open ones have reserved does not.
"""

from typing import Final

from sqlalchemy.ext.asyncio import AsyncSession

from app.clock import Clock
from app.db import Database
from app.settings import Settings
from app.tenants import service as tenants
from app.usage import service as usage
from app.usage.entries import month_of
from app.webhooks import outbox, repository

THRESHOLDS: Final = (80, 100)
"""Percent of the month's tokens."""


async def tell_thresholds(db: Database, settings: Settings, clock: Clock) -> int:
    """Emits what was crossed since the last run; how many tenants had crossed something."""
    async with db.reading() as session:
        listening = await repository.tenants_that_listen(session, outbox.QUOTA_THRESHOLD)
        crossed = [
            tenant_id
            for tenant_id in listening
            if await _untold(session, tenant_id, settings, clock)
        ]
    for tenant_id in crossed:
        async with db.transaction() as session:
            await repository.lock_tenant(session, tenant_id)
            for threshold, limit, used in await _untold(session, tenant_id, settings, clock):
                now = clock.now()
                await outbox.emit(
                    session,
                    tenant_id=tenant_id,
                    type_=outbox.QUOTA_THRESHOLD,
                    data={
                        "month": month_of(now),
                        "threshold_percent": threshold,
                        "limit_tokens": limit,
                        "used_tokens": used,
                    },
                    now=now,
                    give_up_s=settings.webhook_give_up_s,
                    once=_once(tenant_id, month_of(now), threshold),
                )
    return len(crossed)


async def _untold(
    session: AsyncSession, tenant_id: str, settings: Settings, clock: Clock
) -> list[tuple[int, int, int]]:
    """(threshold, limit, used) of what this month was crossed and not told yet."""
    now = clock.now()
    tenant = await tenants.find_tenant(session, tenant_id)
    limit = tenants.effective_limits(tenant, settings).monthly_tokens
    if limit is None:
        return []
    used, _ = await usage.month_standing(session, tenant_id, now)
    return [
        (threshold, limit, used)
        for threshold in THRESHOLDS
        if used * 100 >= limit * threshold
        and not await repository.happened(session, _once(tenant_id, month_of(now), threshold))
    ]


def _once(tenant_id: str, month: str, threshold: int) -> str:
    return f"{outbox.QUOTA_THRESHOLD}:{tenant_id}:{month}:{threshold}"
