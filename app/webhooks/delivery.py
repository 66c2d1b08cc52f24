"""One attempt of one delivery, from claim to what is written. Safe to run twice, safe to kill.

A worker that dies leaves its lease; when that ends the sweep has the delivery sent again. So a
receiver may get a message twice, under the same webhook-id.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Protocol

from cryptography.exceptions import InvalidTag
from sqlalchemy.ext.asyncio import AsyncSession

from app.audit import service as audit
from app.clock import Clock
from app.crypto import SecretError, Secrets
from app.db import Database
from app.settings import Settings
from app.webhooks import metrics, repository
from app.webhooks.backoff import next_attempt
from app.webhooks.models import WebhookDelivery, WebhookEndpoint
from app.webhooks.sender import Outcome, Sender
from app.webhooks.signing import message, signed_headers

LEASE_S = 60.0
"""Longer than any attempt (`webhook_timeout_s` is at most 30)."""
SWEEP_BATCH = 50
SWEEP_PER_TENANT = 10
SWEEP_READ = 1000
KEPT_ATTEMPTS = 20
KEEP = timedelta(days=35)
"""Longer than a month: what is told once a month is remembered as long."""


class DeliveryPlatform(Protocol):
    """The part of the platform that deliveries need."""

    @property
    def settings(self) -> Settings: ...
    @property
    def db(self) -> Database: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def secrets(self) -> Secrets: ...


@dataclass(frozen=True, slots=True)
class _Attempt:
    delivery_id: str
    endpoint_id: str
    number: int
    url: str
    headers: dict[str, str]
    body: bytes


async def deliver(
    platform: DeliveryPlatform, sender: Sender, delivery_id: str, *, hinted: bool = False
) -> str:
    """Makes one attempt if it is due; what came of it, for the log.

    `hinted`: the task was sent for speed alone, so an endpoint that fails is left to the sweep.
    """
    prepared = await _prepare(platform, delivery_id, hinted)
    if isinstance(prepared, str):
        return prepared
    outcome = await sender.send(prepared.url, prepared.headers, prepared.body)
    await _write(platform, prepared, outcome)
    return outcome.code


async def sweep(platform: DeliveryPlatform, sender: Sender) -> int:
    """Sends what is due, side by side; how many. No tenant takes all of one sweep."""
    async with platform.db.reading() as session:
        waiting = await repository.due(session, platform.clock.now(), SWEEP_READ)
    taken: Counter[str] = Counter()
    chosen: list[str] = []
    for entry in waiting:
        if taken[entry.tenant_id] < SWEEP_PER_TENANT and len(chosen) < SWEEP_BATCH:
            taken[entry.tenant_id] += 1
            chosen.append(entry.delivery_id)
    attempts = (deliver(platform, sender, delivery_id) for delivery_id in chosen)
    results = await asyncio.gather(*attempts, return_exceptions=True)
    for error in results:
        if isinstance(error, BaseException):
            raise error  # after all of them have ended; its own delivery keeps its lease
    return len(chosen)


async def clean(platform: DeliveryPlatform) -> int:
    """Removes deliveries that ended long ago; how many."""
    async with platform.db.transaction() as session:
        return await repository.drop_finished(session, platform.clock.now() - KEEP)


# --------------------------------------------------------------------------- before


async def _prepare(platform: DeliveryPlatform, delivery_id: str, hinted: bool) -> _Attempt | str:
    """Claims the delivery and signs its message; or says why there is nothing to send."""
    now = platform.clock.now()
    async with platform.db.transaction() as session:
        row = await repository.delivery(session, delivery_id)
        if row is None:
            return "gone"
        endpoint = await repository.endpoint(session, row.endpoint_id, None)
        if endpoint is None:
            return "gone"
        if endpoint.status != repository.ENABLED:
            await repository.bury(session, endpoint.id, now)
            return "disabled"
        if hinted and endpoint.failing_since is not None:
            return "left to the sweep"
        lease_until = now + timedelta(seconds=LEASE_S)
        number = await repository.claim(session, delivery_id, now, lease_until)
        if number is None:
            return "not due"
        event = await repository.event(session, row.event_id)
        body = message(event.type, event.created_at, event.data)
        try:
            secrets = open_secrets(platform.secrets, endpoint, now)
        except (SecretError, InvalidTag):
            secrets = []
    if not secrets:
        attempt = _Attempt(delivery_id, endpoint.id, number, endpoint.url, {}, body)
        await _write(platform, attempt, Outcome("secret_unreadable"))
        return "secret_unreadable"
    headers = signed_headers(secrets, event.id, now, body)
    return _Attempt(delivery_id, endpoint.id, number, endpoint.url, headers, body)


def open_secrets(secrets: Secrets, endpoint: WebhookEndpoint, now: datetime) -> list[str]:
    """The secrets that sign now, the newest first."""
    sealed = [endpoint.secret]
    if (
        endpoint.previous_secret is not None
        and endpoint.previous_until is not None
        and endpoint.previous_until > now
    ):
        sealed.append(endpoint.previous_secret)
    return [secrets.open_sealed("webhook", one).decode() for one in sealed]


# --------------------------------------------------------------------------- after


async def _write(platform: DeliveryPlatform, attempt: _Attempt, outcome: Outcome) -> None:
    now = platform.clock.now()
    async with platform.db.transaction() as session:
        await repository.lock_endpoint(session, attempt.endpoint_id)
        row = await repository.delivery(session, attempt.delivery_id)
        if row is None:
            return
        values = _ending(row, attempt, outcome, now)
        if not await repository.conclude(session, row.id, attempt.number, **values):
            return
        if outcome.code == "delivered":
            await repository.note_success(session, attempt.endpoint_id, now)
        else:
            await repository.note_failure(session, attempt.endpoint_id, now)
            dead = values["state"] == repository.DEAD
            await _disable_if_hopeless(platform, session, attempt.endpoint_id, outcome, dead, now)
        await metrics.count_attempt(session, outcome.code)  # last: all workers write these rows


def _ending(
    row: WebhookDelivery, attempt: _Attempt, outcome: Outcome, now: datetime
) -> dict[str, Any]:
    """What the row becomes: delivered, pending until its next attempt, or dead."""
    entry = {
        "attempt": attempt.number,
        "at": int(now.timestamp()),
        "code": outcome.code,
        "status": outcome.status,
        "duration_ms": outcome.duration_ms,
    }
    values: dict[str, Any] = {
        "code": outcome.code,
        "attempt_log": [*row.attempt_log, entry][-KEPT_ATTEMPTS:],
    }
    if outcome.code == "delivered":
        return values | {"state": repository.DELIVERED, "finished_at": now}
    asked_s = outcome.retry_after_s
    again = next_attempt(row.id, attempt.number, now, row.give_up_at, asked_s)
    if again is None or outcome.code == "gone":
        return values | {"state": repository.DEAD, "finished_at": now}
    return values | {"state": repository.PENDING, "next_attempt_at": again}


async def _disable_if_hopeless(
    platform: DeliveryPlatform,
    session: AsyncSession,
    endpoint_id: str,
    outcome: Outcome,
    dead: bool,
    now: datetime,
) -> None:
    """An endpoint that says 410 Gone, or that took nothing for days when a message is given up."""
    endpoint = await repository.endpoint(session, endpoint_id, None)
    if endpoint is None:
        return
    await session.refresh(endpoint)
    patience = timedelta(seconds=platform.settings.webhook_disable_after_s)
    failing = endpoint.failing_since is not None and now - endpoint.failing_since >= patience
    reason = "gone" if outcome.code == "gone" else "failing" if dead and failing else None
    if reason is not None and await repository.disable(session, endpoint_id, reason, now):
        await audit.record(
            session,
            actor="worker",
            action="webhook.disable",
            target=endpoint_id,
            tenant_id=endpoint.tenant_id,
            detail={"reason": reason, "code": outcome.code},
            at=now,
        )
