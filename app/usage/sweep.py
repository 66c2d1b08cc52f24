"""Closes the rows whose process never did: from the spool, else from the engine's own journal."""

from collections import defaultdict
from datetime import datetime, timedelta
from typing import Protocol

import structlog

from app.clock import Clock
from app.db import Database
from app.usage import repository
from app.usage.entries import FinalEntry, Status, microseconds
from app.usage.service import Ledger
from engine.errors import EngineUnavailable
from engine.types import JournalEntry

PAGE = 500
STILL_RUNNING = timedelta(seconds=60)
"""A journal entry without an end that was written this recently belongs to a running request."""
ENGINE_GIVEN_UP = timedelta(hours=24)
"""An engine that has been away for this long after the lease will not bring its journal back."""

log = structlog.get_logger(__name__)


class Journals(Protocol):
    async def journal(self, address: str, request_ids: list[str]) -> list[JournalEntry]:
        """What one engine wrote down; raises EngineUnavailable."""
        ...


class SweepPlatform(Protocol):
    """The part of the platform that the sweep needs."""

    @property
    def db(self) -> Database: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def ledger(self) -> Ledger: ...
    @property
    def engines(self) -> Journals: ...


async def close_expired(platform: SweepPlatform) -> int:
    """Closes every row that can be closed now; returns how many. Safe to run anywhere, any time."""
    closed = await platform.ledger.replay()
    after = ""
    while True:
        now = platform.clock.now()
        async with platform.db.transaction() as session:
            page = await repository.expired(session, now, PAGE, after=after)
        if not page:
            return closed
        after = page[-1][0]
        by_engine: defaultdict[str, dict[str, datetime]] = defaultdict(dict)
        for request_id, engine, lease_until in page:
            by_engine[engine][request_id] = lease_until
        for engine, leases in by_engine.items():
            finals = await _finals(platform.engines, engine, leases, now)
            if finals:
                closed += await platform.ledger.write(finals, "sweep")


async def _finals(
    engines: Journals, engine: str, leases: dict[str, datetime], now: datetime
) -> list[FinalEntry]:
    try:
        entries = {entry.request_id: entry for entry in await engines.journal(engine, list(leases))}
    except EngineUnavailable:
        lost = [id_ for id_, lease in leases.items() if now - lease > ENGINE_GIVEN_UP]
        log.warning("sweep_waits_for_engine", rows=len(leases) - len(lost))
        return [_never_counted(id_, engine, now, "engine_lost") for id_ in lost]
    finals = []
    for request_id in leases:
        entry = entries.get(request_id)
        if entry is None:
            finals.append(_never_counted(request_id, engine, now, "never_reached_engine"))
        elif not _is_running(entry, now):
            finals.append(_from_journal(entry, engine, now))
    return finals


def _is_running(entry: JournalEntry, now: datetime) -> bool:
    age_ms = now.timestamp() * 1000 - entry.wall_ms
    return entry.finish is None and age_ms < STILL_RUNNING.total_seconds() * 1000


def _from_journal(entry: JournalEntry, engine: str, now: datetime) -> FinalEntry:
    """What the engine cancelled it cancelled because the api was gone: no client's doing."""
    status: Status = "failed"
    if entry.finish in ("stop", "length"):
        status = "completed"
    elif entry.finish == "cancelled":
        status = "cancelled"
    return FinalEntry(
        request_id=entry.request_id,
        engine=engine,
        status=status,
        prompt_tokens=entry.prompt_tokens,
        cached_tokens=entry.cached_tokens,
        completion_tokens=entry.completion_tokens,
        overshoot_tokens=0,
        finish_reasons=[entry.finish] if entry.finish else [],
        closed_at=now,
        error_code=None if status == "completed" else "api_lost",
        prefill_us=microseconds(entry.prefill_ms),
        decode_us=microseconds(entry.decode_ms),
        adapter_byte_s=round(entry.adapter_byte_seconds),
    )


def _never_counted(request_id: str, engine: str, now: datetime, code: str) -> FinalEntry:
    return FinalEntry(
        request_id=request_id,
        engine=engine,
        status="failed",
        prompt_tokens=0,
        cached_tokens=0,
        completion_tokens=0,
        overshoot_tokens=0,
        finish_reasons=[],
        closed_at=now,
        error_code=code,
    )
