"""The operator's wishes for engines: drain one, resume it. Routers carry them out."""

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from app.audit import service as audit
from app.caller import Caller
from app.db import Database
from app.engines import repository
from app.engines.models import EngineRecord
from app.errors import Conflict, NotFound
from app.ids import new_id
from app.inference.engines import Engine

FORGOTTEN_AFTER = timedelta(days=7)
"""An engine that nobody has seen for so long, and that nobody wants drained, is not listed."""
SEEN_GRAIN = timedelta(seconds=30)
"""`last_seen_at` is not written more often than this."""


async def wishes(db: Database, engines: Sequence[Engine], now: datetime) -> dict[str, bool]:
    """Notes engines that are new or were seen again; by address, whether each is to be drained."""
    addresses = [engine.address for engine in engines]
    async with db.reading() as session:
        known = {row.address: row for row in await repository.addressed(session, addresses)}
    if any(_is_news(engine, known.get(engine.address), now) for engine in engines):
        with contextlib.suppress(IntegrityError):  # another process noted a new one first
            async with db.transaction() as session:
                await _note(session, engines, now)
    return {address: row.drained for address, row in known.items()}


def _is_news(engine: Engine, row: EngineRecord | None, now: datetime) -> bool:
    if row is None:
        return True
    if engine.description is None or not engine.client.alive:
        return False
    return row.last_seen_at is None or now - row.last_seen_at >= SEEN_GRAIN


async def _note(session: AsyncSession, engines: Sequence[Engine], now: datetime) -> None:
    known = {engine.address for engine in engines}
    rows = {row.address: row for row in await repository.everyone(session)}
    numbers = itertools.count(_highest_number(rows.values()) + 1)
    for address, old in list(rows.items()):
        unseen = now - (old.last_seen_at or old.first_seen_at)
        if address not in known and not old.drained and unseen > FORGOTTEN_AFTER:
            await session.delete(rows.pop(address))
    for engine in engines:
        row = rows.get(engine.address)
        if row is None:
            row = rows[engine.address] = EngineRecord(
                id=new_id("eng"),
                name=f"engine-{next(numbers)}",
                address=engine.address,
                drained=False,
                first_seen_at=now,
            )
            session.add(row)
        if engine.description is not None and engine.client.alive:
            row.base_digest, row.last_seen_at = engine.description.base_digest, now


def _highest_number(rows: Iterable[EngineRecord]) -> int:
    """Of `engine-0`, `engine-1`, …; -1 without any."""
    return max((int(row.name.removeprefix("engine-")) for row in rows), default=-1)


async def list_engines(session: AsyncSession) -> Sequence[EngineRecord]:
    return await repository.everyone(session)


async def find_engine(session: AsyncSession, reference: str) -> EngineRecord:
    """By id, name or address. Raises NotFound."""
    row = await repository.find(session, reference)
    if row is None:
        raise NotFound(
            f"There is no engine {reference[:80]!r}; GET /admin/v1/engines or `loramux engines "
            "list` names them.",
            code="engine_not_found",
            param="engine",
        )
    return row


async def set_drained(
    session: AsyncSession, reference: str, *, drained: bool, actor: Caller | str
) -> EngineRecord:
    """States the wish; every api process carries it out within a second."""
    row = await find_engine(session, reference)
    if row.drained != drained:
        row.drained = drained
        await audit.record(
            session,
            actor=actor,
            action="engine.drain" if drained else "engine.resume",
            target=row.id,
            tenant_id=None,
            detail={"name": row.name, "address": row.address},
        )
    return row


def refuse_to_drain_the_last(row: EngineRecord, others: int) -> None:
    """Raises Conflict when no other engine of the same base model takes requests."""
    if others == 0 and not row.drained:
        raise Conflict(
            f"{row.name} is the only engine of its base model that takes requests; while it is "
            "drained every call of that model is refused with 503. Start another one first, or "
            "say that you mean it (force).",
            code="last_engine",
            param="engine",
        )
