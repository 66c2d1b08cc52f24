"""Asking for another limit, and the operator's answer, which is what changes it.

Both are in the audit log: `limits.request`, then `limits.approve` (beside `tenant.update`, which
says what changed) or `limits.decline`; or `limits.withdraw`, by the tenant itself. An answer is
told to the tenant's webhooks too.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, get_args

from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncSession

from app.audit import service as audit
from app.caller import Caller
from app.errors import Conflict, InvalidRequest, NotFound, RateLimited
from app.ids import new_id
from app.limit_requests import repository
from app.limit_requests.models import LimitRequest, RequestState
from app.settings import Settings
from app.tenants.schemas import TenantLimitsIn
from app.tenants.service import effective_limits, find_tenant, require_kept, update_tenant
from app.webhooks import outbox

REQUESTED = "limits.request"
MOST_A_DAY = 5
"""Requests that one tenant may make in 24 hours."""
MOST_TEXT = 500
LimitName = Literal[
    "requests_per_minute",
    "tokens_per_minute",
    "max_concurrent",
    "monthly_tokens",
    "max_tokens",
    "max_adapters",
    "max_stored_bytes",
    "max_rank",
    "ttft_ms",
    "tpot_ms",
]
REQUESTABLE: tuple[str, ...] = get_args(LimitName)
"""The tenant's limits that it may ask about; its weight among tenants is the operator's alone."""
FRACTIONAL = frozenset({"ttft_ms", "tpot_ms"})


async def ask(
    session: AsyncSession,
    caller: Caller,
    *,
    limit_name: str,
    wanted: float,
    reason: str,
    settings: Settings,
    now: datetime,
) -> LimitRequest:
    """Stores the request; nothing changes by it.

    Raises InvalidRequest (`limit`, `wanted`), Conflict while the same limit waits for an answer,
    RateLimited beyond MOST_A_DAY.
    """
    if limit_name not in REQUESTABLE:
        raise InvalidRequest("Choose one of the limits in the list.", param="limit")
    _check_value(limit_name, wanted, "wanted")
    tenant = require_kept(await find_tenant(session, caller.tenant_id, lock=True))
    if await repository.is_open(session, tenant.id, limit_name):
        raise Conflict(
            "This limit was asked for already and waits for an answer.",
            code="limit_request_open",
            param="limit",
        )
    if await repository.count_since(session, tenant.id, now - timedelta(days=1)) >= MOST_A_DAY:
        raise RateLimited(
            f"Your tenant has asked {MOST_A_DAY} times in a day; wait for an answer, or ask again "
            "tomorrow.",
            code="too_many_requests_for_limits",
            retry_after_ms=3_600_000,
        )
    row = LimitRequest(
        id=new_id("lrq"),
        tenant_id=tenant.id,
        limit_name=limit_name,
        current=getattr(effective_limits(tenant, settings), limit_name),
        wanted=wanted,
        reason=reason[:MOST_TEXT],
        asked_by=audit.actor_id(caller),
        asked_label=caller.label[:254],
        created_at=now,
        state="open",
        answer="",
    )
    if row.current == wanted:
        raise InvalidRequest("That is what the limit is now.", param="wanted")
    repository.add(session, row)
    await _record(session, REQUESTED, row, caller, now)
    return row


async def withdraw(
    session: AsyncSession, caller: Caller, request_id: str, *, now: datetime
) -> LimitRequest:
    """Takes back what the caller's tenant asked for. Raises NotFound, or Conflict once decided."""
    row = await _find_open(session, request_id, tenant_id=caller.tenant_id)
    _decide(row, "withdrawn", caller, "", now)
    await _record(session, "limits.withdraw", row, caller, now)
    return row


async def approve(
    session: AsyncSession,
    request_id: str,
    *,
    actor: Caller | str,
    value: float | None,
    answer: str,
    settings: Settings,
    now: datetime,
) -> LimitRequest:
    """Sets the tenant's limit to `value`, or without one to what was asked.

    Raises NotFound, Conflict once decided, InvalidRequest (`value`) for what the limit cannot be.
    """
    row = await _find_open(session, request_id)
    row.granted = row.wanted if value is None else value
    _check_value(row.limit_name, row.granted, "value")
    _decide(row, "approved", actor, answer, now)
    changes = {row.limit_name: value_of(row.limit_name, row.granted)}
    await update_tenant(session, row.tenant_id, changes=changes, now=now, actor=actor)
    await _record(session, "limits.approve", row, actor, now)
    await _tell(session, row, settings, now)
    return row


async def decline(
    session: AsyncSession,
    request_id: str,
    *,
    actor: Caller | str,
    answer: str,
    settings: Settings,
    now: datetime,
) -> LimitRequest:
    """Changes nothing but the request; the tenant reads the answer. Raises as `approve` does, and
    InvalidRequest without a reason."""
    if not answer.strip():
        raise InvalidRequest("Say why: the tenant reads it.", param="answer")
    row = await _find_open(session, request_id)
    _decide(row, "declined", actor, answer, now)
    await _record(session, "limits.decline", row, actor, now)
    await _tell(session, row, settings, now)
    return row


async def find(session: AsyncSession, request_id: str, *, tenant_id: str | None) -> LimitRequest:
    """Raises NotFound, also for another tenant's. `tenant_id=None`: an operator asks."""
    row = await repository.get(session, request_id, tenant_id=tenant_id)
    if row is None:
        raise _not_found(request_id)
    return row


async def list_requests(
    session: AsyncSession,
    *,
    tenant_id: str | None,
    state: RequestState | None = None,
    after: str | None = None,
    limit: int,
) -> Sequence[tuple[LimitRequest, str]]:
    """Requests with their tenants' names, newest first. `tenant_id=None`: an operator asks."""
    return await repository.page(
        session, tenant_id=tenant_id, state=state, after=after, limit=limit
    )


async def waiting(session: AsyncSession, *, limit: int) -> Sequence[tuple[LimitRequest, str]]:
    """For operators: what waits for an answer, oldest first, with the tenants' names."""
    return await repository.waiting_or_answered(session, is_open=True, limit=limit)


async def answered(session: AsyncSession, *, limit: int) -> Sequence[tuple[LimitRequest, str]]:
    """For operators: what was answered, newest first, with the tenants' names."""
    return await repository.waiting_or_answered(session, is_open=False, limit=limit)


def value_of(limit_name: str, value: float) -> float | int:
    """The number as the tenant's column has it."""
    return value if limit_name in FRACTIONAL else int(value)


def _check_value(limit_name: str, value: float, param: str) -> None:
    if limit_name not in FRACTIONAL and value != int(value):
        raise InvalidRequest("The limit is a whole number.", param=param)
    try:
        TenantLimitsIn.model_validate({limit_name: value_of(limit_name, value)})
    except ValidationError as error:
        said = str(error.errors()[0]["msg"])
        raise InvalidRequest(
            f"The limit cannot be that: {said[:1].lower()}{said[1:]}.", param=param
        ) from None


async def _find_open(
    session: AsyncSession, request_id: str, *, tenant_id: str | None = None
) -> LimitRequest:
    row = await repository.get(session, request_id, tenant_id=tenant_id, lock=True)
    if row is None:
        raise _not_found(request_id)
    if row.state != "open":
        raise Conflict(
            f"The request was {row.state} meanwhile; nothing changed.",
            code="limit_request_decided",
        )
    return row


def _not_found(request_id: str) -> NotFound:
    return NotFound(f"There is no request {request_id[:40]!r}; list the requests to see their ids.")


def _decide(
    row: LimitRequest, state: RequestState, actor: Caller | str, answer: str, now: datetime
) -> None:
    row.state, row.answer = state, answer.strip()[:MOST_TEXT]
    row.decided_by = audit.actor_id(actor)
    row.decided_label = (actor if isinstance(actor, str) else actor.label)[:254]
    row.decided_at = now


async def _tell(
    session: AsyncSession, row: LimitRequest, settings: Settings, now: datetime
) -> None:
    """An event for the tenant's webhooks, in the transaction of the answer."""
    granted = None if row.granted is None else value_of(row.limit_name, row.granted)
    await outbox.emit(
        session,
        tenant_id=row.tenant_id,
        type_=outbox.LIMITS_DECIDED,
        data={
            "limit_request_id": row.id,
            "limit": row.limit_name,
            "current": None if row.current is None else value_of(row.limit_name, row.current),
            "wanted": value_of(row.limit_name, row.wanted),
            "granted": granted,
            "state": row.state,
            "answer": row.answer,
        },
        now=now,
        give_up_s=settings.webhook_give_up_s,
    )


async def _record(
    session: AsyncSession, action: str, row: LimitRequest, actor: Caller | str, now: datetime
) -> None:
    detail: dict[str, Any] = {
        "limit": row.limit_name,
        "from": row.current,
        "wanted": row.wanted,
        "reason": row.reason,
    }
    if row.state != "open":
        detail["answer"] = row.answer
    if row.granted is not None:
        detail["granted"] = row.granted
    await audit.record(
        session,
        actor=actor,
        action=action,
        target=row.id,
        tenant_id=row.tenant_id,
        detail=detail,
        at=now,
    )
