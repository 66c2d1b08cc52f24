"""GET /v1/limits: what the caller may use and what of it is used."""

from fastapi import APIRouter, Response

from app.auth import ApiCaller
from app.deps import PlatformDep, ReadSession
from app.limits.schemas import ConcurrencyObject, LimitsObject, MonthObject, WindowObject
from app.limits.service import Limits, limit_headers, scope_of
from app.usage.service import month_standing
from app.usage.spans import next_month

router = APIRouter(prefix="/v1", tags=["limits"])


@router.get("/limits")
async def read_limits(
    caller: ApiCaller, platform: PlatformDep, session: ReadSession, response: Response
) -> LimitsObject:
    """The tenant's limits, those of this key, and where both stand."""
    limits: Limits = platform.limits
    decision = await limits.peek(caller)
    response.headers.update(limit_headers(decision))
    own = caller.limits
    of_tenant = sum(limit is not None for limit in (own.requests_per_minute, own.tokens_per_minute))
    now = platform.clock.now()
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
        max_rank=own.max_rank,
        ttft_ms=own.ttft_ms,
        tpot_ms=own.tpot_ms,
        budget_percentile=own.budget_percentile,
        weight=own.weight,
    )
