"""The ledger: opens a row before the engine sees a request, and closes it exactly once.

open()        commits the row; no row, no request (503 `ledger_unavailable`)
close_soon()  never waits: a writer closes rows in groups, and spools them when it cannot
tick()        renews the leases of running requests and replays the spool
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import structlog
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from app.clock import Clock
from app.db import Database
from app.errors import Conflict, Overloaded, RateLimited
from app.usage import repository, sums_repository, swept
from app.usage.entries import FinalEntry, OpenEntry, month_of
from app.usage.metrics import UsageMetrics
from app.usage.spans import next_month
from app.usage.spool import Spool

DATABASE_TIMEOUT_S = 10.0
GROUP = 200
"""Most rows closed in one transaction."""
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
        self._finals: asyncio.Queue[FinalEntry] = asyncio.Queue()
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
        await self._finals.join()

    async def open(self, entry: OpenEntry) -> MonthLeft | None:
        """Commits the open row and reserves its tokens of the month, or raises.

        Returns where the tightest monthly limit stands then; None without one.

        Overloaded: the database is away. RateLimited: the month's tokens do not suffice.
        Conflict: the request id already has a row.
        """
        now = self._clock.now()
        left: list[MonthLeft] = []
        try:
            async with asyncio.timeout(DATABASE_TIMEOUT_S), self._db.transaction() as session:
                lease_until = repository.lease_end(now, self._lease_s)
                await repository.insert_open(session, entry, now, lease_until)
                for owner in sorted(entry.monthly):
                    limit = entry.monthly[owner]
                    tokens, month = entry.reserved_tokens, month_of(now)
                    used = await repository.reserve_month(session, owner, month, tokens, limit)
                    if used is None:
                        raise _month_is_spent(limit or 0, tokens, now)
                    if limit is not None:
                        left.append(MonthLeft(limit, limit - used, next_month(now) - now))
        except IntegrityError as error:
            raise Conflict(
                "a request with this id was already made; send each request with an id of its own",
                code="duplicate_request_id",
            ) from error
        except DATABASE_AWAY as error:
            log.warning("ledger_unavailable", error=type(error).__name__)
            raise Overloaded(
                "usage cannot be recorded now, so no request is started; retry in a few seconds",
                code="ledger_unavailable",
                retry_after_ms=2000,
            ) from error
        self._running.add(entry.request_id)
        self._metrics.running(len(self._running))
        return min(left, key=lambda month: month.tokens, default=None)

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
        async with asyncio.timeout(DATABASE_TIMEOUT_S), self._db.transaction() as session:
            closed = []
            for entry in sorted(entries, key=lambda entry: entry.request_id):
                row = await repository.close_row(session, entry, closed_by)
                if row is not None:
                    closed.append((row, entry))
            await repository.settle_months(session, closed)
            await sums_repository.add_closed(session, closed)
            if not self._scraped:
                await swept.count(session, (entry for _, entry in closed))
        if self._scraped:
            self._metrics.closed(entry for _, entry in closed)
            self._metrics.attributed((row.tenant_id, row.adapter_id, end) for row, end in closed)
        await self._acknowledge_all(entries)
        return len(closed)

    async def _write_forever(self) -> None:
        while True:
            group = [await self._finals.get()]
            while len(group) < GROUP and not self._finals.empty():
                group.append(self._finals.get_nowait())
            try:
                await self._write_or_spool(group)
            finally:
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
