"""What the tenant may use, how much of it is used now, and asking for more."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from app.audit import service as audit
from app.audit.models import AuditEvent
from app.auth import SessionUser, TenantAdmin
from app.caller import Caller
from app.console.adapters import may_write, tenant_only
from app.console.figures import size
from app.console.forms import Form, read_form
from app.console.render import render
from app.deps import PlatformDep
from app.errors import AppError, InvalidRequest, RateLimited
from app.limits.schemas import LimitsObject
from app.limits.standing import standing
from app.platform import Platform

router = APIRouter(prefix="/console/limits", include_in_schema=False)

REQUESTED = "limits.request"
"""The audit event of a request; operators find it under this action."""
MOST_REQUESTS_A_DAY = 5
MOST_REASON = 500
LIMITS = (
    "Requests per minute",
    "Tokens per minute",
    "Requests at once",
    "Tokens per month",
    "Longest answer",
    "Adapters",
    "Stored adapters",
    "Adapters in an engine",
    "Highest rank",
    "Time to first token",
    "Time per output token",
)


@dataclass(frozen=True, slots=True)
class Meter:
    """One limit with its use; `limit` None: none is set."""

    title: str
    used: int
    limit: int | None
    note: str = ""

    @property
    def share(self) -> float:
        """0 to 1."""
        return min(1.0, self.used / self.limit) if self.limit else 0.0


@router.get("")
async def limits_page(request: Request, caller: SessionUser, platform: PlatformDep) -> Response:
    tenant_only(caller)
    return await _page(request, platform, caller)


@router.post("/request")
async def request_change(request: Request, caller: TenantAdmin, platform: PlatformDep) -> Response:
    """Leaves an audit event, which whoever runs loramux sees; nothing changes by it."""
    tenant_only(caller)
    form = await read_form(request)
    now = platform.clock.now()
    try:
        asked = _asked(form)
        async with platform.db.transaction() as session:
            newest = await audit.list_events(
                session, tenant_id=caller.tenant_id, action=REQUESTED, limit=MOST_REQUESTS_A_DAY
            )
            if sum(event.at > now - timedelta(days=1) for event in newest) >= MOST_REQUESTS_A_DAY:
                raise RateLimited(
                    f"Your tenant has asked {MOST_REQUESTS_A_DAY} times in a day; wait for an "
                    "answer, or ask again tomorrow.",
                    code="too_many_requests_for_limits",
                    retry_after_ms=3_600_000,
                )
            await audit.record(
                session,
                actor=caller,
                action=REQUESTED,
                target=caller.tenant_id,
                tenant_id=caller.tenant_id,
                detail=asked,
                at=now,
            )
    except AppError as error:
        return await _page(request, platform, caller, form=form, error=error)
    return RedirectResponse("/console/limits", status_code=303)


def _asked(form: Form) -> dict[str, str]:
    limit, wanted = form.text("limit"), form.text("wanted", most=60)
    if limit not in LIMITS:
        raise InvalidRequest("Choose one of the limits in the list.", param="limit")
    if not wanted:
        raise InvalidRequest("Say what the limit should be.", param="wanted")
    return {"limit": limit, "wanted": wanted, "reason": form.text("reason", most=MOST_REASON)}


async def _page(
    request: Request,
    platform: Platform,
    caller: Caller,
    *,
    form: Form | None = None,
    error: AppError | None = None,
) -> Response:
    decision = await platform.limits.peek(caller)
    async with platform.db.reading() as session:
        now = await standing(session, caller, decision, platform.clock.now())
        asked = await audit.list_events(
            session, tenant_id=caller.tenant_id, action=REQUESTED, limit=MOST_REQUESTS_A_DAY
        )
    return render(
        request,
        "limits.html",
        status=200 if error is None else error.status,
        meters=_meters(now),
        fixed=_fixed(now),
        limits=LIMITS,
        asked=_requests(asked),
        typed={} if form is None else form.fields,
        most_reason=MOST_REASON,
        error="" if error is None else error.message,
        error_field="" if error is None else error.param,
        may_write=may_write(caller),
    )


def _requests(events: Sequence[AuditEvent]) -> list[dict[str, Any]]:
    return [{**event.detail, "by": event.actor_label, "at": event.at} for event in events]


def _meters(now: LimitsObject) -> list[Meter]:
    meters = [
        Meter(
            f"{level.name.capitalize()} in the last minute",
            level.used,
            level.limit,
            f"all of it is free again in {max(1, round(level.reset_ms / 1000))} s"
            if level.used
            else "",
        )
        for level in now.per_minute
    ]
    meters.append(Meter("Requests at once", now.concurrent, now.max_concurrent))
    for month in now.monthly_tokens:
        held = f"{month.reserved:,} more are held by running requests" if month.reserved else ""
        meters.append(Meter("Tokens this month (UTC)", month.used, month.limit, held))
    return meters


def _fixed(now: LimitsObject) -> list[tuple[str, str]]:
    def count(value: int | None) -> str:
        return "no limit" if value is None else f"{value:,}"

    def budget(value: float | None) -> str:
        return "none" if value is None else f"{value:g} ms"

    stored, most = now.max_stored_bytes, now.max_resident_bytes
    resident = "no limit" if most is None else size(most)
    if now.reserved_resident_bytes:
        resident += f", {size(now.reserved_resident_bytes)} kept from others"
    return [
        ("Longest answer", f"{count(now.max_tokens)} tokens"),
        ("Adapters", count(now.max_adapters)),
        ("Stored adapters", "no limit" if stored is None else size(stored)),
        ("Adapters in an engine", resident),
        ("Highest rank", count(now.max_rank)),
        ("Time to first token", budget(now.ttft_ms)),
        ("Time per output token", budget(now.tpot_ms)),
    ]
