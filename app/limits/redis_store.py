"""Limits shared by every process, in Redis: one script, one round trip, the server's clock.

When Redis is gone nobody is admitted: each process knows only what it admitted itself, so any
share that it gave out alone could pass the limit. The circuit then is open: calls are refused at
once, and Redis is asked again a few times a second. A Redis that comes back without its memory
(it carries a new epoch) is told by every process what that has admitted, and admits again when
all have had the time to do so; so even then no limit is passed.
"""

import asyncio
import secrets
from importlib.resources import files
from typing import Any

import structlog
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from app.clock import Clock, SystemClock
from app.limits.mirror import Mirror
from app.limits.store import (
    SEAT_LEASE_MS,
    Claim,
    Decision,
    Level,
    SeatLevel,
    StoreAway,
)
from app.limits.window import WINDOW_SECONDS

PREFIX = "loramux:limits"
CONNECT_S = 1.0
COMMAND_S = 2.0
CONNECTIONS = 64
PROBE_MS = 500.0
"""How often a Redis that is gone is asked again; the beat is as fast."""
GRACE_MS = 5000.0
"""After Redis lost its memory: by then every process has noticed and said what it admitted."""
PENDING = 10_000

log = structlog.get_logger(__name__)


class RedisLimitStore:
    """`url` is redis://… of one server (replicas behind it are welcome, a cluster is not)."""

    def __init__(self, url: str, *, prefix: str = PREFIX, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        # a command is never sent twice: one that was carried out unheard would count twice
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS,
            timeout=COMMAND_S,
            socket_connect_timeout=CONNECT_S,
            socket_timeout=COMMAND_S,
            retry=Retry(NoBackoff(), 0),
            decode_responses=True,
        )
        self._redis: Redis = Redis.from_pool(pool)
        self._prefix = prefix
        scripts = files("app.limits")
        names = ("epoch", "reserve", "settle", "renew", "reseed")
        self._scripts = {
            name: self._redis.register_script((scripts / f"{name}.lua").read_text())
            for name in names
        }
        self._process = secrets.token_hex(8)
        self._mirror = Mirror()
        self._pending: list[tuple[Claim, int, tuple[int, ...]]] = []
        self._epoch = ""  # as last seen; "" before the first look
        self._closed = False  # the circuit: closed means that calls go through
        self._retry_at_ms = 0.0
        self._recovering = asyncio.Lock()
        self._beat: asyncio.Task[None] | None = None
        self._ending = False

    async def start(self) -> None:
        self._beat = asyncio.create_task(self._beat_forever(), name="limits-beat")

    def problem(self) -> str | None:
        if self._closed:
            return None
        return "Redis does not answer, or has lost its memory and is being told what counts"

    async def close(self) -> None:
        self._ending = True  # redis-py may swallow a cancellation while it disconnects
        if self._beat is not None:
            self._beat.cancel()
            await asyncio.gather(self._beat, return_exceptions=True)
            self._beat = None
        await self._redis.aclose()

    # ------------------------------------------------------------------ what every store does

    async def reserve(self, claim: Claim, lease_ms: int) -> Decision:
        decision = await self._decide(claim, lease_ms, take=True)
        if decision.admitted:
            self._mirror.take(claim, decision.slot)
        return decision

    async def peek(self, claim: Claim) -> Decision:
        return await self._decide(claim, 0, take=False)

    async def settle(self, claim: Claim, slot: int, unused: tuple[int, ...]) -> None:
        """Never raises. While Redis is away it is noted down and settled later; a settlement that
        broke off is not sent again: in doubt, units count until their minute is over."""
        self._mirror.settle(claim, slot, unused)
        if not self._closed:
            self._pending.append((claim, slot, unused))
            del self._pending[:-PENDING]
            return
        epoch = self._epoch
        try:
            await self._send_settlement(epoch, claim, slot, unused)
        except (RedisError, OSError) as error:
            self._trip(epoch, error)

    async def renew(self, seats: list[tuple[str, str]], lease_ms: int) -> None:
        epoch = await self._usable_epoch()
        try:
            await self._scripts["renew"](
                keys=[self._key(key.split(":", 1)[0], key) for key, _ in seats],
                args=[lease_ms, *(request_id for _, request_id in seats)],
            )
        except (RedisError, OSError) as error:
            raise self._trip(epoch, error) from error

    # ------------------------------------------------------------------ commands

    async def _decide(self, claim: Claim, lease_ms: int, *, take: bool) -> Decision:
        epoch = await self._usable_epoch()
        args: list[str | int] = [epoch, len(claim.windows), int(take), claim.request_id, lease_ms]
        for taken in claim.windows:
            args += [taken.limit, taken.amount]
        args += [seat.limit for seat in claim.seats]
        try:
            reply: Any = await self._scripts["reserve"](keys=self._keys(claim), args=args)
        except (RedisError, OSError) as error:
            raise self._trip(epoch, error) from error
        if reply[0] == -1 or epoch != self._epoch:
            raise self._trip(epoch, None)
        second, refused, wait_ms, *figures = (int(value) for value in reply)
        levels = tuple(
            Level(taken.name, taken.limit, used=figures[2 * i], reset_ms=figures[2 * i + 1])
            for i, taken in enumerate(claim.windows)
        )
        taken_seats = figures[2 * len(levels) :]
        seats = tuple(
            SeatLevel(seat.key, seat.limit, used)
            for seat, used in zip(claim.seats, taken_seats, strict=True)
        )
        if refused == 0:
            return Decision(second, levels, seats)
        name = "concurrency" if refused < 0 else claim.windows[refused - 1].name
        return Decision(second, levels, seats, refused_by=name, wait_ms=wait_ms)

    async def _send_settlement(
        self, epoch: str, claim: Claim, slot: int, unused: tuple[int, ...]
    ) -> None:
        await self._scripts["settle"](
            keys=self._keys(claim),
            args=[epoch, len(claim.windows), claim.request_id, slot, *unused],
        )

    def _key(self, group: str, key: str) -> str:
        return f"{self._prefix}:{{{group}}}:{key}"

    def _keys(self, claim: Claim) -> list[str]:
        keys = [f"{self._prefix}:epoch"]
        keys += [self._key(claim.group, taken.key) for taken in claim.windows]
        keys += [self._key(claim.group, seat.key) for seat in claim.seats]
        return keys

    # ------------------------------------------------------------------ the circuit

    async def _usable_epoch(self) -> str:
        """The epoch to send commands under; raises StoreAway while the circuit is open."""
        if self._closed:
            return self._epoch
        if self._clock.monotonic_ms() < self._retry_at_ms or (
            self._epoch and self._recovering.locked()
        ):
            raise self._away()
        await self._recover()
        return self._epoch

    def _trip(self, epoch: str, error: Exception | None) -> StoreAway:
        """Opens the circuit after a failure under `epoch`; what to raise."""
        if self._closed and epoch == self._epoch:
            self._closed = False
            self._retry_at_ms = 0.0  # at once: perhaps only a connection was lost
            reason = "memory_lost" if error is None else type(error).__name__
            log.warning("limits_unavailable", reason=reason)
        return self._away(GRACE_MS if error is None else 0.0)

    def _away(self, at_least_ms: float = 0.0) -> StoreAway:
        return StoreAway(max(PROBE_MS, at_least_ms, self._retry_at_ms - self._clock.monotonic_ms()))

    async def _recover(self) -> None:
        """Closes the circuit if Redis answers and everybody's counts are in it; or StoreAway."""
        async with self._recovering:
            if self._closed:
                return
            if self._clock.monotonic_ms() < self._retry_at_ms:
                raise self._away()
            try:
                # those that lie idle may have been cut too, and would fail the next command
                await self._redis.connection_pool.disconnect(inuse_connections=False)
                left_ms = await self._synchronise()
            except (RedisError, OSError) as error:
                self._retry_at_ms = self._clock.monotonic_ms() + PROBE_MS
                raise self._away() from error
            if left_ms > 0:
                self._retry_at_ms = self._clock.monotonic_ms() + left_ms
                raise self._away()
            self._closed = True
            log.info("limits_available")

    async def _synchronise(self) -> float:
        """Brings Redis and this process to one account; how long to wait for the others, in ms."""
        token, age_ms = await self._read_epoch()
        if token != self._epoch:
            if not await self._reseed(token):
                return PROBE_MS
            self._epoch = token
        else:
            pending, self._pending = self._pending, []
            for claim, slot, unused in pending:
                await self._send_settlement(token, claim, slot, unused)
        return GRACE_MS - age_ms

    async def _read_epoch(self) -> tuple[str, float]:
        """A server that has been up for longer than a window can have lost nothing that counts,
        unless this process remembers another epoch."""
        nothing_lost = False
        if not self._epoch:
            uptime_s = (await self._redis.info("server"))["uptime_in_seconds"]
            nothing_lost = int(uptime_s) > 2 * WINDOW_SECONDS
        token, age_ms = await self._scripts["epoch"](
            keys=[f"{self._prefix}:epoch"], args=[secrets.token_hex(8), int(nothing_lost)]
        )
        return str(token), float(age_ms)

    async def _reseed(self, token: str) -> bool:
        """Tells Redis what this process admitted. False when the epoch changed under way."""
        self._pending.clear()  # the mirror knows of them
        entries = list(self._mirror.entries())
        seats = [
            (self._key(group, key), request_id)
            for request_id, held in self._mirror.seats.items()
            for group, key in held
        ]
        units = [value for _, _, second, amount in entries for value in (second, amount)]
        said = await self._scripts["reseed"](
            keys=[
                f"{self._prefix}:epoch",
                f"{self._prefix}:epoch:{token}",
                *(self._key(group, key) for group, key, _, _ in entries),
                *(key for key, _ in seats),
            ],
            args=[
                token,
                self._process,
                SEAT_LEASE_MS,
                len(entries),
                *units,
                *(request_id for _, request_id in seats),
            ],
        )
        return bool(said)

    async def _beat_forever(self) -> None:
        """Notices that Redis is gone, back, or has forgotten, even while nobody calls."""
        while not self._ending:
            try:
                if self._closed:
                    await self._look()
                elif self._clock.monotonic_ms() >= self._retry_at_ms:
                    await self._recover()
            except StoreAway:
                pass
            except Exception as error:  # noqa: BLE001 - the beat goes on whatever happened
                log.warning("limits_beat_failed", error=type(error).__name__)
            await asyncio.sleep(PROBE_MS / 1000.0)

    async def _look(self) -> None:
        epoch = self._epoch
        try:
            token = await self._redis.hget(f"{self._prefix}:epoch", "token")
        except (RedisError, OSError) as error:
            self._trip(epoch, error)
            return
        if str(token) != epoch:
            self._trip(epoch, None)
