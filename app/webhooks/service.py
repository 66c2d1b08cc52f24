"""A tenant's endpoints and their deliveries. The tenant comes from the caller alone."""

import re
from collections.abc import Sequence
from datetime import datetime, timedelta

import structlog
from cryptography.exceptions import InvalidTag
from sqlalchemy.ext.asyncio import AsyncSession

from app.audit import service as audit
from app.caller import Caller
from app.crypto import SecretError, Secrets
from app.errors import Conflict, Forbidden, NotFound, RateLimited
from app.ids import new_id
from app.settings import Settings
from app.webhooks import outbox, repository
from app.webhooks.models import WebhookDelivery, WebhookEndpoint
from app.webhooks.schemas import WebhookChange, WebhookIn
from app.webhooks.signing import new_secret

log = structlog.get_logger(__name__)

ID = re.compile(r"[a-z]{3}_[0-9a-z]{1,36}", re.ASCII)
MAX_PENDING = 100
"""Deliveries of one endpoint that may wait when somebody asks for another by hand."""


def webhook_not_found(endpoint_id: str) -> NotFound:
    """The one answer for unknown, foreign and deleted endpoints."""
    return NotFound(
        f"There is no webhook {endpoint_id[:64]!r}; GET /v1/webhooks lists yours.",
        code="webhook_not_found",
        param="webhook_id",
    )


def require_whole_tenant(caller: Caller) -> None:
    """Endpoints are told of every adapter, so a key that may see only some has none of them."""
    if caller.adapter_scope is not None:
        raise Forbidden(
            "This key is limited to some adapters, and webhooks tell of all of them; use a key "
            "without that limit.",
            code="key_scope",
        )


def require_writer(caller: Caller) -> None:
    require_whole_tenant(caller)
    if caller.role == "tenant_viewer":
        raise Forbidden(
            "Viewers cannot change webhooks; ask an admin of your tenant.", code="read_only_role"
        )


# --------------------------------------------------------------------------- endpoints


async def create(
    session: AsyncSession,
    caller: Caller,
    wanted: WebhookIn,
    url: str,
    *,
    secrets: Secrets,
    settings: Settings,
    now: datetime,
) -> tuple[WebhookEndpoint, str]:
    """`url` is what `Sender.check` answered. Returns the row and its secret, this once."""
    require_writer(caller)
    await repository.lock_tenant(session, caller.tenant_id)
    held = await repository.endpoints_of(session, caller.tenant_id)
    if len(held) >= settings.tenant_max_webhooks:
        raise Conflict(
            f"A tenant has at most {settings.tenant_max_webhooks} webhooks; delete one that is no "
            "longer needed.",
            code="too_many_webhooks",
        )
    secret = new_secret()
    row = WebhookEndpoint(
        id=new_id("whe"),
        tenant_id=caller.tenant_id,
        url=url,
        description=wanted.description,
        events=list(dict.fromkeys(wanted.events)),
        status=repository.ENABLED,
        secret=secrets.seal("webhook", secret.encode()),
        secret_version=secrets.current_version,
        created_by=audit.actor_id(caller),
        created_at=now,
        updated_at=now,
    )
    session.add(row)
    await session.flush()
    await _record(session, caller, "webhook.create", row, now, {"events": row.events})
    return row, secret


async def list_endpoints(session: AsyncSession, caller: Caller) -> Sequence[WebhookEndpoint]:
    require_whole_tenant(caller)
    return await repository.endpoints_of(session, caller.tenant_id)


async def find(session: AsyncSession, caller: Caller, endpoint_id: str) -> WebhookEndpoint:
    """Raises NotFound, the same for a foreign endpoint and an unknown one."""
    require_whole_tenant(caller)
    row = None
    if ID.fullmatch(endpoint_id):
        row = await repository.endpoint(session, endpoint_id, caller.tenant_id)
    if row is None:
        raise webhook_not_found(endpoint_id)
    return row


async def change(
    session: AsyncSession,
    caller: Caller,
    endpoint_id: str,
    wanted: WebhookChange,
    url: str | None,
    *,
    now: datetime,
) -> WebhookEndpoint:
    """Changes what was sent; `url` is what `Sender.check` answered for a new one."""
    require_writer(caller)
    row = await find(session, caller, endpoint_id)
    if url is not None:
        row.url = url
    if wanted.events is not None:
        row.events = list(dict.fromkeys(wanted.events))
    if wanted.description is not None:
        row.description = wanted.description
    if wanted.enabled:
        row.status = repository.ENABLED
        row.disabled_reason = row.failing_since = None
    row.updated_at = now
    await session.flush()
    if wanted.enabled is False:
        await repository.disable(session, row.id, "by hand", now)
        await session.refresh(row)
    changed = {"changed": sorted(wanted.model_fields_set), "enabled": row.status == "enabled"}
    await _record(session, caller, "webhook.update", row, now, changed)
    return row


async def remove(session: AsyncSession, caller: Caller, endpoint_id: str, *, now: datetime) -> None:
    require_writer(caller)
    row = await find(session, caller, endpoint_id)
    await _record(session, caller, "webhook.delete", row, now, {})
    await repository.delete_endpoint(session, row.id)


async def rotate_secret(
    session: AsyncSession,
    caller: Caller,
    endpoint_id: str,
    *,
    secrets: Secrets,
    overlap: timedelta,
    now: datetime,
) -> tuple[WebhookEndpoint, str]:
    """A new secret; messages carry the old one's signature too until the overlap ends."""
    require_writer(caller)
    row = await find(session, caller, endpoint_id)
    secret = new_secret()
    if overlap:
        row.previous_secret, row.previous_version = row.secret, row.secret_version
        row.previous_until = now + overlap
    else:
        row.previous_secret = row.previous_version = row.previous_until = None
    row.secret = secrets.seal("webhook", secret.encode())
    row.secret_version = secrets.current_version
    row.updated_at = now
    await session.flush()
    seconds = int(overlap.total_seconds())
    await _record(session, caller, "webhook.rotate_secret", row, now, {"overlap_s": seconds})
    return row, secret


# --------------------------------------------------------------------------- deliveries


async def list_deliveries(
    session: AsyncSession,
    caller: Caller,
    endpoint_id: str,
    *,
    state: str | None,
    after: str | None,
    limit: int,
) -> Sequence[WebhookDelivery]:
    row = await find(session, caller, endpoint_id)
    return await repository.page_deliveries(
        session,
        endpoint_id=row.id,
        tenant_id=caller.tenant_id,
        state=state,
        after=after,
        limit=limit,
    )


async def send_test(
    session: AsyncSession,
    caller: Caller,
    endpoint_id: str,
    *,
    settings: Settings,
    now: datetime,
) -> WebhookDelivery:
    """A `webhook.test` event for this endpoint, whatever it asked to be told."""
    require_writer(caller)
    row = await find(session, caller, endpoint_id)
    await _require_room(session, row)
    return await outbox.emit_to(
        session,
        row,
        type_=outbox.TEST,
        data={"webhook_id": row.id, "message": "This is a test; nothing has happened."},
        now=now,
        give_up_s=settings.webhook_give_up_s,
    )


async def resend(
    session: AsyncSession,
    caller: Caller,
    endpoint_id: str,
    delivery_id: str,
    *,
    settings: Settings,
    now: datetime,
) -> WebhookDelivery:
    """Makes a delivery due now, with all its attempts before it again."""
    require_writer(caller)
    row = await find(session, caller, endpoint_id)
    delivery = None
    if ID.fullmatch(delivery_id):
        delivery = await repository.delivery(session, delivery_id, row.id)
    if delivery is None:
        raise NotFound(
            f"The webhook has no delivery {delivery_id[:64]!r}; its deliveries are listed, and "
            "kept for some weeks.",
            code="delivery_not_found",
            param="delivery_id",
        )
    if delivery.state == repository.PENDING:
        delivery.next_attempt_at = now
        await session.flush()
        return delivery
    await _require_room(session, row)
    delivery.state = repository.PENDING
    delivery.attempts = 0
    delivery.next_attempt_at = now
    delivery.give_up_at = now + timedelta(seconds=settings.webhook_give_up_s)
    delivery.finished_at = None
    await session.flush()
    await _record(session, caller, "webhook.resend", row, now, {"delivery_id": delivery.id})
    return delivery


async def _require_room(session: AsyncSession, row: WebhookEndpoint) -> None:
    if row.status != repository.ENABLED:
        raise Conflict(
            "The webhook is disabled; enable it first.", code="webhook_disabled", param="webhook_id"
        )
    if await repository.count_pending(session, row.id) >= MAX_PENDING:
        raise RateLimited(
            f"{MAX_PENDING} deliveries to this webhook are waiting already; see to it that it "
            "answers, then try again.",
            code="too_many_pending",
            retry_after_ms=60_000,
        )


# --------------------------------------------------------------------------- operators


async def disable_any(
    session: AsyncSession, caller: Caller, endpoint_id: str, *, now: datetime
) -> WebhookEndpoint:
    """An operator stops messages to an endpoint of any tenant."""
    row = None
    if ID.fullmatch(endpoint_id):
        row = await repository.endpoint(session, endpoint_id, None)
    if row is None:
        raise NotFound(
            f"There is no webhook {endpoint_id[:64]!r}; GET /admin/v1/webhooks lists them.",
            code="webhook_not_found",
            param="webhook_id",
        )
    if await repository.disable(session, row.id, "by an operator", now):
        await session.refresh(row)
        await _record(session, caller, "webhook.disable", row, now, {"reason": "by an operator"})
    return row


async def reseal(session: AsyncSession, secrets: Secrets, now: datetime, most: int) -> int:
    """Moves sealed secrets to the root secret's current version; how many endpoints."""
    moved = 0
    for row in await repository.sealed_by_others(session, secrets.current_version, most):
        try:
            _reseal_one(row, secrets, now)
        except (SecretError, InvalidTag):
            log.error("webhook_secret_unreadable", webhook_id=row.id)
        else:
            moved += 1
    await session.flush()
    return moved


def _reseal_one(row: WebhookEndpoint, secrets: Secrets, now: datetime) -> None:
    plain = secrets.open_sealed("webhook", row.secret)
    previous = None
    if row.previous_secret is not None and row.previous_until is not None:
        if row.previous_until > now:
            previous = secrets.open_sealed("webhook", row.previous_secret)
        else:
            row.previous_until = None
    row.secret = secrets.seal("webhook", plain)
    row.secret_version = secrets.current_version
    row.previous_secret = None if previous is None else secrets.seal("webhook", previous)
    row.previous_version = None if previous is None else secrets.current_version


async def _record(
    session: AsyncSession,
    caller: Caller,
    action: str,
    row: WebhookEndpoint,
    now: datetime,
    detail: dict[str, object],
) -> None:
    """Without the URL, which may hold a secret of the receiver's."""
    await audit.record(
        session,
        actor=caller,
        action=action,
        target=row.id,
        tenant_id=row.tenant_id,
        detail=detail,
        at=now,
    )
