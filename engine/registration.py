"""An engine's line in Redis: where it is reached, what it serves, how busy it is.

    loramux:engines            set of the ids of engines
    loramux:engine:{id}        a Registration as JSON; it expires unless the engine renews it

The registrar is a thread of its own, so a step that hangs does not end the lease: whether the
engine moves is told by its beat. A Redis that is away costs the line and nothing else.
"""

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from engine.ipc import AddressRefused
from engine.types import EngineStatus

if TYPE_CHECKING:
    from redis import Redis

MEMBERS = "loramux:engines"
KEY_PREFIX = "loramux:engine:"
RENEWALS = 4
"""How often a lease is renewed within its time."""
REDIS_S = 2.0
"""Longest time that one command may take."""
WILDCARD_HOSTS = frozenset({"0.0.0.0", "*", "::"})

_log = logging.getLogger(__name__)


def key_of(engine_id: str) -> str:
    return f"{KEY_PREFIX}{engine_id}"


@dataclass(frozen=True, slots=True)
class Registration:
    """`address` is what clients connect to. Which adapters are where is asked of the engine."""

    engine_id: str
    address: str
    base_model: str
    base_digest: str
    public_key: str | None = None  # CURVE, of an engine on tcp; clients trust their settings alone
    draining: bool = False
    running: int = 0
    waiting: int = 0
    adapters: dict[str, int] = field(default_factory=dict)  # how many, by tier

    def with_load(self, status: EngineStatus) -> "Registration":
        """The same engine as it is now."""
        return replace(
            self,
            draining=status.draining,
            running=status.running,
            waiting=status.waiting,
            adapters=dict(Counter(item.tier for item in status.adapters)),
        )


def encode(registration: Registration) -> bytes:
    return msgspec.json.encode(registration)


def decode(text: bytes) -> Registration:
    """Raises msgspec.DecodeError (its subclass ValidationError where a field is wrong), and
    RecursionError for what is nested too deeply."""
    return msgspec.json.decode(text, type=Registration)


def advertised(listen: str, advertise: str | None) -> str:
    """The address that clients are told. Raises AddressRefused where none could be reached."""
    address = advertise or listen
    if not address.startswith(("ipc://", "tcp://")):
        raise AddressRefused(f"{address[:60]!r} is neither ipc://path nor tcp://host:port")
    if address.startswith("tcp://") and urlsplit(address).hostname in (None, *WILDCARD_HOSTS):
        raise AddressRefused(
            f"an engine that listens on {listen} and registers must say how clients reach it: "
            "--advertise tcp://its-host:port"
        )
    return address


class Registrar(threading.Thread):
    """Writes the line and renews it until `withdraw`, then takes it back."""

    def __init__(
        self,
        url: str,
        registration: Registration,
        lease_ms: float,
        ask: Callable[[Callable[[EngineStatus], None]], None],
    ) -> None:
        """`ask` has the engine's status told to what it is given, sooner or later."""
        super().__init__(name="engine-registrar", daemon=True)
        self._url = url
        self._registration = registration
        self._lease_ms = lease_ms
        self._ask = ask
        self._withdrawn: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._away = False

    def withdraw(self) -> None:
        """No new requests from now on; safe in a signal handler."""
        self._withdrawn.put(None)

    def close(self) -> None:
        """Withdraws and waits until the line is gone, or Redis has not answered in time."""
        self.withdraw()
        self.join(4 * REDIS_S)

    def run(self) -> None:
        from redis import Redis

        redis = Redis.from_url(self._url, socket_timeout=REDIS_S, socket_connect_timeout=REDIS_S)
        try:
            while True:
                self._try(redis, self._renew)
                self._ask(self._hear)
                try:
                    self._withdrawn.get(timeout=self._lease_ms / 1000 / RENEWALS)
                except queue.Empty:
                    continue
                self._try(redis, self._remove)
                return
        finally:
            redis.close()

    def _hear(self, status: EngineStatus) -> None:
        self._registration = self._registration.with_load(status)

    def _try(self, redis: "Redis", act: Callable[["Redis"], None]) -> None:
        from redis.exceptions import RedisError

        try:
            act(redis)
        except (RedisError, OSError) as error:
            if not self._away:
                _log.warning("the engine's registration waits: %s", type(error).__name__)
            self._away = True
            return
        if self._away:
            _log.info("the engine is registered again")
        self._away = False

    def _renew(self, redis: "Redis") -> None:
        line = self._registration
        with redis.pipeline(transaction=True) as commands:
            commands.set(key_of(line.engine_id), encode(line), px=int(self._lease_ms))
            commands.sadd(MEMBERS, line.engine_id)
            commands.execute()

    def _remove(self, redis: "Redis") -> None:
        engine_id = self._registration.engine_id
        with redis.pipeline(transaction=True) as commands:
            commands.delete(key_of(engine_id))
            commands.srem(MEMBERS, engine_id)
            commands.execute()
