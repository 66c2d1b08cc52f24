"""`authz_fail` events: a valid credential asked for what it may not have.

A client that keeps asking must not fill the log, so the same refusal of the same caller is
written once a minute.
"""

from collections import OrderedDict

import structlog
from sqlalchemy.exc import SQLAlchemyError

from app.audit import service as audit
from app.caller import Caller
from app.clock import Clock
from app.db import Database

EVERY_MS = 60_000
_REMEMBERED = 10_000
_log = structlog.get_logger("loramux.audit")


class Refusals:
    """Writes them in transactions of their own: the refused request has none."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock
        self._written_ms: OrderedDict[tuple[str, str], float] = OrderedDict()

    async def note(self, caller: Caller, reason: str, *, address: str | None = None) -> None:
        """`reason` is the refusal's code. Never raises: the caller is being refused anyway."""
        now_ms = self._clock.monotonic_ms()
        actor = audit.actor_id(caller)
        last = self._written_ms.get((actor, reason))
        if last is not None and now_ms - last < EVERY_MS:
            return
        self._written_ms[actor, reason] = now_ms
        self._written_ms.move_to_end((actor, reason))
        while len(self._written_ms) > _REMEMBERED:
            self._written_ms.popitem(last=False)
        try:
            await audit.record_alone(
                self._db,
                actor=caller,
                action="authz_fail",
                target=actor,
                tenant_id=caller.tenant_id or None,
                detail={"reason": reason, **({} if address is None else {"address": address})},
                at=self._clock.now(),
            )
        except (SQLAlchemyError, OSError) as error:
            _log.error("refusal_not_recorded", reason=reason, error=type(error).__name__)
