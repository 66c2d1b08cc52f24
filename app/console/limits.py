"""What the tenant may use, how much of it is used now, and asking for more."""

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import RedirectResponse
from sqlalchemy.ext.asyncio import AsyncSession

from app.auth import SessionUser, TenantAdmin
from app.caller import Caller
from app.console.adapters import may_write, tenant_only
from app.console.figures import size
from app.console.forms import Form, submit
from app.console.render import render
from app.deps import PlatformDep
from app.errors import AppError, InvalidRequest
from app.limit_requests import service as limit_requests
from app.limit_requests.models import LimitRequest
from app.limits.schemas import LimitsObject
from app.limits.standing import standing
from app.platform import Platform

router = APIRouter(prefix="/console/limits", include_in_schema=False)

MOST_SHOWN = 10
RequestId = Annotated[str, Path(max_length=40)]
TITLES = {
    "requests_per_minute": "Requests per minute",
    "tokens_per_minute": "Tokens per minute",
    "max_concurrent": "Requests at once",
    "monthly_tokens": "Tokens per month",
    "max_tokens": "Longest answer, tokens",
    "max_adapters": "Adapters",
    "max_stored_bytes": "Stored adapters, bytes",
    "max_rank": "Highest rank",
    "ttft_ms": "Time to first token, ms",
    "tpot_ms": "Time per output token, ms",
}
assert TITLES.keys() == set(limit_requests.REQUESTABLE), "say what each limit is called"
_GROUPING = re.compile(r"[ ,_\u00a0\u2009\u202f]")


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
    """Waits for whoever runs loramux; nothing changes before they approve it."""
    tenant_only(caller)

    async def ask(session: AsyncSession, form: Form) -> LimitRequest:
        return await limit_requests.ask(
            session,
            caller,
            limit_name=form.text("limit"),
            wanted=typed_number(form, "wanted"),
            reason=form.text("reason", most=limit_requests.MOST_TEXT),
            settings=platform.settings,
            now=platform.clock.now(),
        )

    async def done(_: LimitRequest) -> Response:
        return RedirectResponse("/console/limits#asked", status_code=303)

    async def again(form: Form, error: AppError) -> Response:
        return await _page(request, platform, caller, form=form, error=error)

    return await submit(request, platform.db, ask, done=done, again=again)


@router.post("/requests/{request_id}/withdraw")
async def withdraw_request(
    request_id: RequestId, request: Request, caller: TenantAdmin, platform: PlatformDep
) -> Response:
    tenant_only(caller)

    async def withdraw(session: AsyncSession, _: Form) -> LimitRequest:
        now = platform.clock.now()
        return await limit_requests.withdraw(session, caller, request_id, now=now)

    async def done(_: LimitRequest) -> Response:
        return RedirectResponse("/console/limits#asked", status_code=303)

    async def again(_: Form, error: AppError) -> Response:
        return await _page(request, platform, caller, error=error)

    async def find(session: AsyncSession) -> object:
        return await limit_requests.find(session, request_id, tenant_id=caller.tenant_id)

    return await submit(request, platform.db, withdraw, done=done, again=again, find=find)


def typed_number(form: Form, field: str) -> float:
    """The number, however its thousands are set apart."""
    typed = form.text(field, most=60)
    if not typed:
        raise InvalidRequest("Say what the limit should be.", param=field)
    return Form({field: _GROUPING.sub("", typed)}).number(field, 0.0)


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
        asked = await limit_requests.list_requests(
            session, tenant_id=caller.tenant_id, limit=MOST_SHOWN
        )
    return render(
        request,
        "limits.html",
        meters=_meters(now, platform.settings.ledger_lease_s),
        fixed=_fixed(now),
        limits=TITLES,
        asked=[request_row(row) for row, _ in asked],
        typed={} if form is None else form.fields,
        most_reason=limit_requests.MOST_TEXT,
        error=error,
        may_write=may_write(caller),
    )


def request_row(row: LimitRequest) -> dict[str, Any]:
    """A request as the pages show it."""

    def shown(value: float | None) -> str:
        if value is None:
            return "none"
        number = f"{limit_requests.value_of(row.limit_name, value):,}"
        return f"{number} ({size(int(value))})" if row.limit_name == "max_stored_bytes" else number

    return {
        "id": row.id,
        "tenant_id": row.tenant_id,
        "limit": TITLES.get(row.limit_name, row.limit_name),
        "current": shown(row.current),
        "wanted": shown(row.wanted),
        "wanted_value": limit_requests.value_of(row.limit_name, row.wanted),
        "granted": shown(row.granted) if row.granted not in (None, row.wanted) else "",
        "reason": row.reason,
        "by": row.asked_label,
        "at": row.created_at,
        "state": row.state,
        "answer": row.answer,
        "decided_by": row.decided_label,
        "decided_at": row.decided_at,
    }


def _meters(now: LimitsObject, lease_s: float) -> list[Meter]:
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
        held = _held(month.reserved, now, lease_s)
        meters.append(Meter("Tokens this month (UTC)", month.used, month.limit, held))
    return meters


def _held(tokens: int, now: LimitsObject, lease_s: float) -> str:
    """Whose the reserved tokens are. A process that ended leaves some behind, until the lease of
    its calls is over; what runs is known where it is counted, by a limit of requests at once."""
    if not tokens:
        return ""
    if now.concurrent:
        return f"{tokens:,} more are held by running requests"
    holders = "calls" if now.max_concurrent is not None else "running requests, or by calls"
    return (
        f"{tokens:,} more are held by {holders} whose process ended; these are closed and give "
        f"back what they hold when its lease is over, after about {math.ceil(lease_s / 60)} min"
    )


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
