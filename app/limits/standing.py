"""Where a caller stands within its limits: what /v1/limits and the console's page show."""

from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from app.caller import Caller
from app.limits.schemas import ConcurrencyObject, LimitsObject, MonthObject, WindowObject
from app.limits.service import scope_of
from app.limits.store import Decision
from app.usage.service import month_standing
from app.usage.spans import next_month


async def standing(
    session: AsyncSession, caller: Caller, decision: Decision, now: datetime
) -> LimitsObject:
    """The tenant's limits, those of its key, and where both stand. `decision`: as peeked at."""
    own = caller.limits
    of_tenant = sum(limit is not None for limit in (own.requests_per_minute, own.tokens_per_minute))
    months = []
    owners = [("tenant", caller.tenant_id, own.monthly_tokens)]
    if caller.key_id is not None:
        owners.append(("key", caller.key_id, caller.key_limits.monthly_tokens))
    for scope, owner, limit in owners:
        used, reserved = await month_standing(session, owner, now)
        months.append(
            MonthObject(
                scope=scope, limit=limit, used=used, reserved=reserved, resets_at=next_month(now)
            )
        )
    seats = [
        ConcurrencyObject(scope=scope_of(seat, caller), limit=seat.limit, used=seat.used)
        for seat in decision.seats
    ]
    return LimitsObject(
        per_minute=[
            WindowObject(
                scope="tenant" if index < of_tenant else "key",
                name=level.name,
                limit=level.limit,
                used=level.used,
                remaining=level.remaining,
                reset_ms=level.reset_ms,
            )
            for index, level in enumerate(decision.levels)
        ],
        max_concurrent=own.max_concurrent,
        concurrent=next((seat.used for seat in seats if seat.scope == "tenant"), 0),
        concurrency=seats,
        monthly_tokens=months,
        max_tokens=own.max_tokens,
        max_adapters=own.max_adapters,
        max_stored_bytes=own.max_stored_bytes,
        max_resident_bytes=own.max_resident_bytes,
        reserved_resident_bytes=own.reserved_resident_bytes,
        max_rank=own.max_rank,
        ttft_ms=caller.ttft_ms,
        tpot_ms=caller.tpot_ms,
        budget_percentile=caller.budget_percentile,
        weight=own.weight,
    )
