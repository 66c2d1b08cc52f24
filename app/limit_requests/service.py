"""Asking for another limit, and the operator's answer, which is what changes it.

Both are in the audit log: `limits.request`, then `limits.accept` (beside `tenant.update`, which
says what changed) or `limits.decline`.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncSession

from app.audit import service as audit
from app.caller import Caller
from app.errors import Conflict, InvalidRequest, NotFound, RateLimited
from app.ids import new_id
from app.limit_requests import repository
from app.limit_requests.models import LimitRequest
from app.settings import Settings
from app.tenants.schemas import TenantLimitsIn
from app.tenants.service import effective_limits, find_tenant, require_kept, update_tenant

REQUESTED = "limits.request"
MOST_A_DAY = 5
"""Requests that one tenant may make in 24 hours."""
MOST_TEXT = 500
REQUESTABLE = (
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
)
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
    _check_value(limit_name, wanted)
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


async def accept(
    session: AsyncSession, request_id: str, *, actor: Caller, answer: str, now: datetime
) -> LimitRequest:
    """Sets the tenant's limit to what was asked. Raises NotFound, or Conflict once decided."""
    row = await _find_open(session, request_id)
    _decide(row, "accepted", actor, answer, now)
    changes = {row.limit_name: value_of(row.limit_name, row.wanted)}
    await update_tenant(session, row.tenant_id, changes=changes, now=now, actor=actor)
    await _record(session, "limits.accept", row, actor, now)
    return row


async def decline(
    session: AsyncSession, request_id: str, *, actor: Caller, answer: str, now: datetime
) -> LimitRequest:
    """Changes nothing but the request; the tenant reads the answer. Raises as `accept` does, and
    InvalidRequest without a reason."""
    if not answer:
        raise InvalidRequest("Say why: the tenant reads it.", param="answer")
    row = await _find_open(session, request_id)
    _decide(row, "declined", actor, answer, now)
    await _record(session, "limits.decline", row, actor, now)
    return row


async def requests_of(
    session: AsyncSession, tenant_id: str, *, limit: int
) -> Sequence[LimitRequest]:
    """A tenant's requests, newest first."""
    return await repository.newest_of(session, tenant_id, limit=limit)


async def requests(
    session: AsyncSession, *, is_open: bool, limit: int
) -> Sequence[tuple[LimitRequest, str]]:
    """For operators: requests with their tenants' names; those that wait, oldest first, or those
    that were answered, newest first."""
    return await repository.page(session, is_open=is_open, limit=limit)


def value_of(limit_name: str, value: float) -> float | int:
    """The number as the tenant's column has it."""
    return value if limit_name in FRACTIONAL else int(value)


def _check_value(limit_name: str, wanted: float) -> None:
    try:
        TenantLimitsIn.model_validate({limit_name: value_of(limit_name, wanted)})
    except ValidationError as error:
        said = str(error.errors()[0]["msg"])
        raise InvalidRequest(
            f"The limit cannot be that: {said[:1].lower()}{said[1:]}.", param="wanted"
        ) from None


async def _find_open(session: AsyncSession, request_id: str) -> LimitRequest:
    row = await repository.get(session, request_id)
    if row is None:
        raise NotFound(
            f"There is no request {request_id[:40]!r}; it may have gone with its tenant."
        )
    if row.state != "open":
        raise Conflict(
            f"The request was {row.state} by {row.decided_label} meanwhile; nothing changed.",
            code="limit_request_decided",
        )
    return row


def _decide(row: LimitRequest, state: str, actor: Caller, answer: str, now: datetime) -> None:
    row.state, row.answer = state, answer[:MOST_TEXT]
    row.decided_by, row.decided_label = audit.actor_id(actor), actor.label[:254]
    row.decided_at = now


async def _record(
    session: AsyncSession, action: str, row: LimitRequest, actor: Caller, now: datetime
) -> None:
    detail: dict[str, Any] = {
        "limit": row.limit_name,
        "from": row.current,
        "wanted": row.wanted,
        "reason": row.reason,
    }
    if row.state != "open":
        detail["answer"] = row.answer
    await audit.record(
        session,
        actor=actor,
        action=action,
        target=row.id,
        tenant_id=row.tenant_id,
        detail=detail,
        at=now,
    )
