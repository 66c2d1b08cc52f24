"""The engines behind this process: who is alive, who holds which adapter, who is asked next."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from app.errors import Overloaded
from engine.errors import EngineError, EngineUnavailable
from engine.text import TextCodec
from engine.types import (
    AdapterRef,
    EngineStatus,
    GenerateRequest,
    JournalEntry,
    ModelDescription,
    RequestOutput,
)

POLL_S = 1.0
ASK_TIMEOUT_S = 10.0
RESIDENT_BONUS = {"device": 4, "host": 2, "loading": 2}
"""How many more requests an engine may have in flight than another before the adapter moves."""

log = structlog.get_logger(__name__)


class EngineLink(Protocol):
    """What the router needs of `engine.client.EngineClient`."""

    @property
    def alive(self) -> bool: ...
    async def start(self) -> None: ...
    async def close(self) -> None: ...
    async def describe(self) -> ModelDescription: ...
    def generate(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]: ...
    async def cancel(self, request_id: str, choice: int | None = None) -> None: ...
    async def status(self) -> EngineStatus: ...
    async def forget(self, ref: AdapterRef) -> bool: ...
    async def journal(self, request_ids: Iterable[str]) -> list[JournalEntry]: ...
    async def acknowledge(self, request_ids: Iterable[str]) -> None: ...


Connect = Callable[[str], EngineLink]
Remember = Callable[[ModelDescription], Awaitable[None]]


@dataclass
class Engine:
    """One engine as this process last saw it."""

    address: str
    client: EngineLink
    description: ModelDescription | None = None
    status: EngineStatus | None = None
    in_flight: set[str] = field(default_factory=set)
    problem: str = "it has not answered yet"

    @property
    def usable(self) -> bool:
        return (
            self.description is not None
            and self.client.alive
            and not (self.status is not None and self.status.draining)
        )

    def tier(self, ref: AdapterRef | None) -> str | None:
        if ref is None or self.status is None:
            return None
        return next((r.tier for r in self.status.adapters if r.adapter == ref), None)


class EngineRouter:
    """Engines whose tokenizer is not the api's are never used.

    `load_codec` reads the base model's tokenizer (it blocks, so a thread runs it); `remember` is
    awaited with every description that an engine gives.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        load_codec: Callable[[], TextCodec],
        connect: Connect,
        remember: Remember,
    ) -> None:
        self._engines = {address: Engine(address, connect(address)) for address in addresses}
        self._load_codec = load_codec
        self._remember = remember
        self._codec: TextCodec | None = None
        self._codec_problem = "the tokenizer is being read"
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        for engine in self._engines.values():
            await engine.client.start()
        self._watcher = asyncio.create_task(self._watch(), name="engine-watch")

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
            self._watcher = None
        for engine in self._engines.values():
            await engine.client.close()

    @property
    def codec(self) -> TextCodec:
        """The base model's text codec; raises Overloaded until it has been read."""
        if self._codec is None:
            raise self._unavailable()
        return self._codec

    @property
    def all(self) -> list[Engine]:
        return list(self._engines.values())

    @property
    def links(self) -> list[EngineLink]:
        """The clients of all engines, reachable or not."""
        return [engine.client for engine in self._engines.values()]

    async def refresh(self) -> None:
        """Reads the tokenizer if that is still to do, and asks every engine how it is."""
        if await self._read_codec():
            await asyncio.gather(*(self._ask(engine) for engine in self._engines.values()))

    def description(self, base_digest: str | None = None) -> ModelDescription:
        """The base model that is served; raises Overloaded while no engine has described one."""
        for engine in self._engines.values():
            found = engine.description
            if found is not None and base_digest in (None, found.base_digest):
                return found
        raise self._unavailable()

    def choose(self, ref: AdapterRef | None, base_digest: str | None = None) -> Engine:
        """The usable engine of that base model with the least load, residency counted in favour.

        Raises Overloaded (503) when there is none.
        """
        usable = [
            engine
            for engine in self._engines.values()
            if engine.usable
            and engine.description is not None
            and base_digest in (None, engine.description.base_digest)
        ]
        if not usable:
            raise self._unavailable()
        return min(usable, key=lambda engine: _cost(engine, ref))

    async def journal(self, address: str, request_ids: list[str]) -> list[JournalEntry]:
        """What one engine wrote down of these requests; raises EngineUnavailable."""
        engine = self._engines.get(address)
        if engine is None:
            raise EngineUnavailable("this engine is not among the configured ones")
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                return await engine.client.journal(request_ids)
        except TimeoutError as error:
            raise EngineUnavailable("the engine did not answer in time") from error

    async def acknowledge(self, address: str, request_ids: list[str]) -> None:
        """Lets an engine forget journal entries; one that is away keeps them, which is harmless."""
        engine = self._engines.get(address)
        if engine is None:
            return
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                await engine.client.acknowledge(request_ids)
        except (EngineError, TimeoutError) as error:
            log.info("journal_not_acknowledged", rows=len(request_ids), error=type(error).__name__)

    def problem(self) -> str | None:
        """Why no call can be served now, for /readyz; None when one can."""
        if self._codec is None:
            return self._codec_problem
        if any(engine.usable for engine in self._engines.values()):
            return None
        return "; ".join(f"{e.address}: {e.problem}" for e in self._engines.values())

    async def _watch(self) -> None:
        while True:
            if await self._read_codec():
                break
            await asyncio.sleep(POLL_S)
        await asyncio.gather(*(self._poll(engine) for engine in self._engines.values()))

    async def _poll(self, engine: Engine) -> None:
        """Each engine for itself, so that one which is away delays no other's figures."""
        while True:
            await self._ask(engine)
            await asyncio.sleep(POLL_S)

    async def _read_codec(self) -> bool:
        if self._codec is None:
            try:
                self._codec = await asyncio.to_thread(self._load_codec)
            except (EngineError, OSError) as error:
                self._codec_problem = str(error)
        return self._codec is not None

    async def _ask(self, engine: Engine) -> None:
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                status = await engine.client.status()
                known = engine.status is not None and engine.status.engine_id == status.engine_id
                if engine.description is None or not known:
                    await self._accept(engine, await engine.client.describe())
                engine.status = status
        except (EngineError, TimeoutError) as error:
            engine.problem = getattr(error, "message", "it does not answer")

    async def _accept(self, engine: Engine, description: ModelDescription) -> None:
        if description.tokenizer_digest == self.codec.tokenizer_digest:
            await self._remember(description)
            engine.description, engine.problem = description, "it is not connected"
            return
        engine.description = None
        engine.problem = (
            "its base model has another tokenizer than the api's; set LORAMUX_BASE_MODEL to the "
            "same files for both"
        )
        log.error("tokenizer_mismatch", engine=engine.address)

    def _unavailable(self) -> Overloaded:
        return Overloaded(
            "no engine can take the request now; retry in a few seconds",
            code="engine_unavailable",
            retry_after_ms=2000,
        )


def _cost(engine: Engine, ref: AdapterRef | None) -> tuple[float, str]:
    load: float = len(engine.in_flight)
    if engine.status is not None:
        load = max(load, engine.status.running + engine.status.waiting)
    return load - RESIDENT_BONUS.get(engine.tier(ref) or "", 0), engine.address
