"""The ledger: opens a row before the engine sees a request, and closes it exactly once.

open()        commits the row, with others' in one transaction; no row, no request (503
              `ledger_unavailable`)
close_soon()  never waits: a writer closes rows in groups, and spools them when it cannot
tick()        renews the leases of running requests and replays the spool
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta

import structlog
from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from app.clock import Clock
from app.db import Database
from app.errors import Conflict, Overloaded, RateLimited
from app.grouping import Grouped
from app.usage import ledger_repository, repository, swept
from app.usage.entries import FinalEntry, OpenEntry, month_of
from app.usage.ledger_repository import Closed
from app.usage.metrics import UsageMetrics
from app.usage.spans import next_month
from app.usage.spool import Spool

DATABASE_TIMEOUT_S = 10.0
GROUP = 200
"""Most rows opened or closed in one transaction."""
GATHER_S = 0.05
"""How long the first ended call waits for others, so that one transaction closes them all."""
DATABASE_AWAY = (SQLAlchemyError, OSError, TimeoutError)

Acknowledge = Callable[[str, list[str]], Awaitable[None]]
"""Tells an engine (by address) that its journal entries of these requests may go."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class MonthLeft:
    """A limit of tokens a month, and what is neither billed nor reserved of it."""

    limit: int
    tokens: int
    resets_in: timedelta

    def headers(self) -> dict[str, str]:
        """x-ratelimit-{limit,remaining,reset}-monthly-tokens."""
        return {
            "x-ratelimit-limit-monthly-tokens": str(self.limit),
            "x-ratelimit-remaining-monthly-tokens": str(self.tokens),
            "x-ratelimit-reset-monthly-tokens": f"{-(-self.resets_in // timedelta(seconds=1))}s",
        }


class Ledger:
    """One per process. `acknowledge` is called after rows are safely closed."""

    def __init__(
        self,
        db: Database,
        clock: Clock,
        spool: Spool,
        metrics: UsageMetrics,
        *,
        lease_s: float,
        acknowledge: Acknowledge,
        scraped: bool = True,
    ) -> None:
        """`scraped`: this process has a /metrics; what others close is counted in SQL."""
        self._db = db
        self._clock = clock
        self._spool = spool
        self._metrics = metrics
        self._lease_s = lease_s
        self._acknowledge = acknowledge
        self._scraped = scraped
        self._running: set[str] = set()
        self._openings = Grouped(self._open_all, GROUP)
        self._finals: asyncio.Queue[FinalEntry] = asyncio.Queue()
        self._unwritten = 0  # final entries that are neither in the database nor in the spool
        self._hurry = asyncio.Event()
        self._renew_at_ms = 0.0
        self._spooled = True  # files of an earlier process may be waiting
        self._writer: asyncio.Task[None] | None = None

    @property
    def running(self) -> frozenset[str]:
        """Ids of requests that were admitted here and have not ended."""
        return frozenset(self._running)

    async def start(self) -> None:
        self._writer = asyncio.create_task(self._write_forever(), name="ledger-writer")

    async def close(self) -> None:
        """Writes or spools everything that has ended, then stops."""
        if self._writer is None:
            return
        await self.drain()
        self._writer.cancel()
        await asyncio.gather(self._writer, return_exceptions=True)
        self._writer = None

    async def drain(self) -> None:
        """Returns when every final entry handed in so far is in the database or in the spool."""
        self._hurry.set()
        try:
            await self._finals.join()
        finally:
            self._hurry.clear()

    async def open(self, entry: OpenEntry) -> MonthLeft | None:
        """Commits the open row and reserves its tokens of the month, or raises.

        Returns where the tightest monthly limit stands then; None without one.

        Overloaded: the database is away. RateLimited: the month's tokens do not suffice.
        Conflict: the request id already has a row.
        """
        try:
            async with asyncio.timeout(DATABASE_TIMEOUT_S):
                left = await self._open_together(entry)
        except DATABASE_AWAY as error:
            log.warning("ledger_unavailable", error=type(error).__name__)
            raise Overloaded(
                "usage cannot be recorded now, so no request is started; retry in a few seconds",
                code="ledger_unavailable",
                retry_after_ms=2000,
            ) from error
        self._running.add(entry.request_id)
        self._metrics.running(len(self._running))
        return left

    async def _open_together(self, entry: OpenEntry) -> MonthLeft | None:
        """Tokens that ended calls have not given back yet are waited for, not refused."""
        try:
            return await self._openings.do(entry)
        except RateLimited:
            if not self._unwritten:
                raise
            await self.drain()
            return await self._openings.do(entry)

    async def _open_all(self, entries: list[OpenEntry]) -> list[MonthLeft | Exception | None]:
        """One transaction, or one for each where a request id was used before."""
        now = self._clock.now()
        lease_until = repository.lease_end(now, self._lease_s)
        try:
            return await self._db.write_in_thread(
                lambda connection: _open(connection, entries, now, lease_until)
            )
        except IntegrityError:
            if len(entries) > 1:
                return [answer for entry in entries for answer in await self._open_all([entry])]
            return [
                Conflict(
                    "a request with this id was already made; send each request with an id of its "
                    "own",
                    code="duplicate_request_id",
                )
            ]

    async def move(self, request_id: str, engine: str) -> None:
        """Another engine runs the request. Raises Overloaded while the database is away."""
        try:
            async with asyncio.timeout(DATABASE_TIMEOUT_S), self._db.transaction() as session:
                await repository.move_open(session, request_id, engine)
        except DATABASE_AWAY as error:
            log.warning("ledger_unavailable", error=type(error).__name__)
            raise Overloaded(
                "usage cannot be recorded now; retry in a few seconds",
                code="ledger_unavailable",
                retry_after_ms=2000,
            ) from error

    def close_soon(self, entry: FinalEntry) -> None:
        """Hands over how a request ended. Never waits and never raises."""
        self._running.discard(entry.request_id)
        self._metrics.running(len(self._running))
        self._unwritten += 1
        self._finals.put_nowait(entry)

    async def tick(self) -> None:
        """Every few seconds: leases of running requests, then what the spool holds."""
        if self._spooled:
            await self.replay()
        now_ms = self._clock.monotonic_ms()
        if self._running and now_ms >= self._renew_at_ms:
            try:
                async with asyncio.timeout(DATABASE_TIMEOUT_S), self._db.transaction() as session:
                    until = repository.lease_end(self._clock.now(), self._lease_s)
                    await repository.renew_leases(session, sorted(self._running), until)
                self._renew_at_ms = now_ms + self._lease_s * 1000.0 / 4
            except DATABASE_AWAY as error:
                log.warning("leases_not_renewed", error=type(error).__name__)

    async def replay(self) -> int:
        """Closes the rows that wait in the spool; returns how many were closed."""
        try:
            entries = await asyncio.to_thread(self._spool.entries)
        except OSError as error:
            log.error("spool_unreadable", error=type(error).__name__)
            return 0
        self._metrics.spooled(len(entries))
        if not entries:
            self._spooled = False
            return 0
        try:
            closed = await self.write(entries, "spool")
        except DATABASE_AWAY:
            return 0
        await asyncio.to_thread(self._spool.remove, [entry.request_id for entry in entries])
        self._metrics.spooled(0)
        return closed

    async def write(self, entries: Sequence[FinalEntry], closed_by: str) -> int:
        """Closes rows in one transaction; raises what `DATABASE_AWAY` names. First close wins."""
        async with asyncio.timeout(DATABASE_TIMEOUT_S):
            closed = await self._db.write_in_thread(
                lambda connection: self._close(connection, entries, closed_by)
            )
        if self._scraped:
            self._metrics.closed(entry for _, entry in closed)
            self._metrics.attributed((row.tenant_id, row.adapter_id, end) for row, end in closed)
        await self._acknowledge_all(entries)
        return len(closed)

    def _close(
        self, connection: Connection, entries: Sequence[FinalEntry], closed_by: str
    ) -> list[tuple[Closed, FinalEntry]]:
        """The rows, their months and their sums, or nothing; nobody scrapes a worker: counted."""
        closed = ledger_repository.close_rows(connection, entries, closed_by)
        ledger_repository.settle_months(connection, closed)
        ledger_repository.add_closed(connection, closed)
        if not self._scraped:
            swept.count(connection, [(row.tenant_id, entry) for row, entry in closed])
        return closed

    async def _write_forever(self) -> None:
        while True:
            group = [await self._finals.get()]
            with suppress(TimeoutError):
                async with asyncio.timeout(GATHER_S):
                    await self._hurry.wait()
            while len(group) < GROUP and not self._finals.empty():
                group.append(self._finals.get_nowait())
            try:
                await self._write_or_spool(group)
            finally:
                self._unwritten -= len(group)
                for _ in group:
                    self._finals.task_done()

    async def _write_or_spool(self, group: list[FinalEntry]) -> None:
        try:
            await self.write(group, "api")
        except Exception as error:  # noqa: BLE001 - the last net: whatever failed, no row is lost
            log.warning("rows_spooled", rows=len(group), error=type(error).__name__)
            self._spooled = True
            for entry in group:
                await self._spool_one(entry)

    async def _spool_one(self, entry: FinalEntry) -> None:
        try:
            await asyncio.to_thread(self._spool.put, entry)
        except OSError as error:  # the sweep will close the row from the engine's journal
            log.error("row_not_spooled", request_id=entry.request_id, error=type(error).__name__)

    async def _acknowledge_all(self, entries: Sequence[FinalEntry]) -> None:
        by_engine: dict[str, list[str]] = {}
        for entry in entries:
            by_engine.setdefault(entry.engine, []).append(entry.request_id)
        for engine, request_ids in by_engine.items():
            await self._acknowledge(engine, request_ids)


def _open(
    connection: Connection, entries: Sequence[OpenEntry], now: datetime, lease_until: datetime
) -> list[MonthLeft | Exception | None]:
    """Rows for those whose owners' months have room; nothing of the others is kept."""
    month, resets_in = month_of(now), next_month(now) - now
    left: dict[str, list[MonthLeft]] = {entry.request_id: [] for entry in entries}
    held: dict[str, list[str]] = {entry.request_id: [] for entry in entries}  # by these owners
    refused: dict[str, RateLimited] = {}
    asked = {pair for entry in entries for pair in entry.monthly.items()}
    for owner, limit in sorted(asked, key=lambda pair: (pair[0], pair[1] or 0)):
        asking = [
            entry
            for entry in entries
            if entry.request_id not in refused and entry.monthly.get(owner, -1) == limit
        ]
        if not asking:
            continue
        amounts = [entry.reserved_tokens for entry in asking]
        standing = ledger_repository.reserve_month(connection, owner, month, amounts, limit)
        for entry, used in zip(asking, standing, strict=True):
            if used is None:
                refused[entry.request_id] = _month_is_spent(limit or 0, entry.reserved_tokens, now)
                continue
            held[entry.request_id].append(owner)
            if limit is not None:
                left[entry.request_id].append(MonthLeft(limit, limit - used, resets_in))
    given_back: Counter[str] = Counter()
    for entry in entries:
        if entry.request_id in refused:
            given_back.update(dict.fromkeys(held[entry.request_id], entry.reserved_tokens))
    ledger_repository.release_months(connection, month, given_back)
    admitted = [entry for entry in entries if entry.request_id not in refused]
    if admitted:
        ledger_repository.insert_open(connection, admitted, now, lease_until)
    return [
        refused.get(entry.request_id)
        or min(left[entry.request_id], key=lambda of: of.tokens, default=None)
        for entry in entries
    ]


async def month_standing(session: AsyncSession, owner_id: str, now: datetime) -> tuple[int, int]:
    """(billed, reserved) tokens of a tenant or a key in the current calendar month (UTC)."""
    return await repository.month_used(session, owner_id, month_of(now))


def _month_is_spent(limit: int, tokens: int, now: datetime) -> RateLimited:
    return RateLimited(
        f"the limit is {limit} tokens a month (UTC) and what is left does not cover this call's "
        f"{tokens} (prompt and max_tokens); lower max_tokens or ask for a higher limit",
        code="monthly_tokens_exceeded",
        retry_after_ms=int((next_month(now) - now).total_seconds() * 1000) + 1000,
    )
