"""A version's life as server-sent events, from the rows alone: no session is held in between.

event: state    {"state", "code", "reason", "attempt"}     at once, and on every change
event: check    a check of the report                      as soon as its row is there
event: done     the version object with its report         then the stream ends
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import structlog
from pydantic import BaseModel
from sqlalchemy.exc import SQLAlchemyError

from app.adapters import repository, run_repository, states
from app.adapters.models import Adapter, AdapterVersion, Check, ValidationRun
from app.adapters.resources import Resources
from app.adapters.views import check_object, report_object, version_object

POLL_S = 0.5
KEEP_ALIVE_S = 15.0
LONGEST_S = 3600.0
"""Then the stream ends without `done`; the client asks again."""

log = structlog.get_logger(__name__)


async def _read(
    resources: Resources, version_id: str
) -> tuple[AdapterVersion, ValidationRun | None, list[Check], Adapter] | None:
    async with resources.db.reading() as session:
        version = await repository.version_by_id(session, version_id)
        if version is None:
            return None
        adapter = await repository.adapter_of(session, version)
        run = (await run_repository.latest_runs(session, [version_id])).get(version_id)
        checks = [] if run is None else list(await run_repository.checks_of(session, [run.id]))
        return version, run, checks, adapter


async def version_events(
    resources: Resources, version_id: str, *, poll_s: float = POLL_S
) -> AsyncIterator[bytes]:
    """The frames; ends after a terminal state, or when the version is gone. While the database is
    away it tells nothing and waits."""
    started_ms = last_sent_ms = resources.clock.monotonic_ms()
    shown: dict[str, Any] | None = None
    sent: set[str] = set()
    while (now_ms := resources.clock.monotonic_ms()) - started_ms < LONGEST_S * 1000:
        try:
            found = await _read(resources, version_id)
        except (SQLAlchemyError, OSError) as error:  # the row will say later what happened
            log.warning("events_wait_for_database", error=type(error).__name__)
            await asyncio.sleep(poll_s)
            continue
        if found is None:
            return
        version, run, checks, adapter = found
        frames = []
        state = {
            "state": version.state,
            "code": version.code,
            "reason": version.reason,
            "attempt": 0 if run is None else run.attempts,
        }
        if state != shown:
            shown = state
            frames.append(_frame("state", state))
        frames.extend(_frame("check", check_object(c)) for c in checks if c.id not in sent)
        sent.update(check.id for check in checks)
        if version.state in states.TERMINAL:
            report = None if run is None else report_object(run, checks)
            frames.append(_frame("done", version_object(adapter, version, report)))
            yield b"".join(frames)
            return
        if frames:
            yield b"".join(frames)
            last_sent_ms = now_ms
        elif now_ms - last_sent_ms > KEEP_ALIVE_S * 1000:
            yield b": still here\n\n"
            last_sent_ms = now_ms
        await asyncio.sleep(poll_s)


def _frame(event: str, data: BaseModel | dict[str, Any]) -> bytes:
    text = data.model_dump_json() if isinstance(data, BaseModel) else json.dumps(data)
    return f"event: {event}\ndata: {text}\n\n".encode()
