"""Engines that registered themselves in Redis, as far as this process may use them.

Redis says where an engine is; whom to trust is said by the settings alone. An engine on tcp is
taken only with a public key that LORAMUX_ENGINE_PUBLIC_KEYS has (CURVE then proves that it holds
the secret half), one on ipc only in a folder in which the settings have engines.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec
import structlog
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from app.settings import Settings
from engine.registration import KEY_PREFIX, MEMBERS, Registration, decode

CONNECT_S = 1.0
COMMAND_S = 2.0
ADDRESS_CHARACTERS = 255
MOST = 1000
"""Engines that are looked at; the rest is refused."""
LINE_BYTES = 65_536
"""A longer line is cut off there, and is then no JSON."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Registered:
    """What an engine says of itself, and how long that still holds."""

    line: Registration
    lease_ms: int

    @property
    def address(self) -> str:
        return self.line.address


@dataclass(frozen=True, slots=True)
class Roll:
    """The registry at one moment, by address. `refused` says why."""

    engines: dict[str, Registered] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    unreadable: int = 0
    """Lines that are no registrations."""


class EngineRegistry:
    """One per process. `roll` is what was last read."""

    def __init__(self, settings: Settings) -> None:
        assert settings.engine_registry_url is not None
        self._settings = settings
        self._redis: Redis = Redis.from_url(
            settings.engine_registry_url,
            socket_connect_timeout=CONNECT_S,
            socket_timeout=COMMAND_S,
            retry=Retry(NoBackoff(), 0),
        )
        self.roll = Roll()
        self.problem: str | None = "the engine registry has not been read yet"

    async def read(self) -> bool:
        """Takes over what is registered now; False while Redis does not answer, `roll` stays."""
        try:
            found = await self._lines()
        except (RedisError, OSError) as error:
            if self.problem is None:
                log.warning("engine_registry_away", error=type(error).__name__)
            self.problem = f"the engine registry does not answer ({type(error).__name__})"
            return False
        self.problem = None
        roll = screen(self._settings, found)
        for address, why in roll.refused.items():
            if address not in self.roll.refused:
                log.error("engine_refused", engine=address, reason=why)
        if roll.unreadable > self.roll.unreadable:
            log.warning("engine_registrations_unreadable", lines=roll.unreadable)
        self.roll = roll
        return True

    def public_key(self, address: str) -> str | None:
        """The trusted CURVE key of a registered engine; None where it needs none."""
        found = self.roll.engines.get(address)
        return found.line.public_key if found is not None else None

    async def close(self) -> None:
        await self._redis.aclose()

    async def _lines(self) -> list[tuple[bytes, int]]:
        """(line, lease) of those whose lease runs; the expired are taken off the list.

        Others may write what they like there: no more than LINE_BYTES of a line is fetched, and
        what is no line at all is passed over.
        """
        members = sorted(cast(set[bytes], await self._redis.smembers(MEMBERS)))[:MOST]
        if not members:
            return []
        keys = [KEY_PREFIX.encode() + member for member in members]
        async with self._redis.pipeline(transaction=False) as commands:
            for key in keys:
                commands.getrange(key, 0, LINE_BYTES)
            for key in keys:
                commands.pttl(key)
            answers = await commands.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, RedisError) and not isinstance(answer, ResponseError):
                raise answer
        found = zip(members, answers[: len(keys)], answers[len(keys) :], strict=True)
        lines: list[tuple[bytes, int]] = []
        gone: list[bytes] = []
        for member, line, lease_ms in found:
            if line == b"":
                gone.append(member)
            else:  # one that is no string answers with a ResponseError
                is_line = isinstance(line, bytes) and isinstance(lease_ms, int)
                lines.append((line, lease_ms) if is_line else (b"", 0))
        if gone:
            await self._redis.srem(MEMBERS, *gone)
        return lines


def screen(settings: Settings, lines: Sequence[tuple[bytes, int]]) -> Roll:
    """Which of these lines (JSON, what is left of the lease in ms) may be used, and why not.

    Where two engines name one address, the one whose lease is the longest is there now.
    """
    readable = list(_readable(lines))
    roll = Roll(unreadable=len(lines) - len(readable))
    for item in sorted(readable, key=lambda item: item.lease_ms):
        roll.engines.pop(item.address, None)
        roll.refused.pop(item.address, None)
        why = refusal(settings, item.line)
        if why is None:
            roll.engines[item.address] = item
        else:
            roll.refused[item.address] = why
    return roll


def refusal(settings: Settings, line: Registration) -> str | None:
    """Why an engine that registered is not used; None when it is."""
    if line.address in settings.engines:
        return None  # known by its name, with the key that stands beside it
    if line.address.startswith("tcp://"):
        if line.public_key in settings.engine_public_keys:
            return None
        return (
            "it registered with a public key that this process does not know; add the key that "
            "`loramux secrets init` printed there to LORAMUX_ENGINE_PUBLIC_KEYS"
        )
    folder = line.address.rpartition("/")[0]
    if line.address.startswith("ipc://") and folder in engine_folders(settings):
        return None
    return (
        "it registered with a socket outside the folders of LORAMUX_ENGINES and LORAMUX_DATA_DIR; "
        "let it listen there, or name it in LORAMUX_ENGINES"
    )


def engine_folders(settings: Settings) -> set[str]:
    """Where sockets of engines may lie, as `ipc:///folder`."""
    named = [address for address in settings.engines if address.startswith("ipc://")]
    return {address.rpartition("/")[0] for address in (settings.own_engine, *named)}


def _readable(lines: Sequence[tuple[bytes, int]]) -> Iterator[Registered]:
    for text, lease_ms in lines:
        try:
            line = decode(text)
        except (msgspec.DecodeError, RecursionError):
            continue
        if len(line.address) <= ADDRESS_CHARACTERS and line.address.isprintable():
            yield Registered(line, max(0, lease_ms))
