"""The engines behind this process: who is alive, who holds which adapter, who is asked next.

Engines may serve different base models. Each is used only with the codec of its own tokenizer, and
a request goes only to engines of its base (by digest).
"""

import asyncio
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import structlog
from sqlalchemy.exc import SQLAlchemyError

from app.engines.registry import Registered, Roll
from app.errors import Overloaded
from app.inference import routing
from app.inference.links import Links
from app.inference.routing import Candidate
from engine.errors import EngineError, EngineUnavailable
from engine.text import TextCodec
from engine.types import (
    AdapterRef,
    EngineStatus,
    GenerateRequest,
    JournalEntry,
    ModelDescription,
    RequestOutput,
    StepCounts,
)

POLL_S = 1.0
SAMPLES = 61
"""So many figures of each engine's steps are kept, one a poll: a minute."""
ASK_TIMEOUT_S = 10.0

log = structlog.get_logger(__name__)


class EngineLink(Protocol):
    """What the router needs of `engine.client.EngineClient`."""

    @property
    def alive(self) -> bool: ...
    @property
    def draining(self) -> bool: ...
    async def start(self) -> None: ...
    async def close(self) -> None: ...
    async def describe(self) -> ModelDescription: ...
    def generate(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]: ...
    def unread(self, request_id: str) -> int: ...
    async def cancel(self, request_id: str, choice: int | None = None) -> None: ...
    async def status(self) -> EngineStatus: ...
    async def forget(self, ref: AdapterRef) -> bool: ...
    async def drain(self) -> None: ...
    async def resume(self) -> None: ...
    async def journal(self, request_ids: Iterable[str]) -> list[JournalEntry]: ...
    async def acknowledge(self, request_ids: Iterable[str]) -> None: ...


Connect = Callable[[str], EngineLink]
Remember = Callable[[ModelDescription], Awaitable[None]]
Wishes = Callable[[Sequence["Engine"]], Awaitable[Mapping[str, bool]]]
"""Notes which engines there are; by address, whether the operator wants each drained."""


class Registry(Protocol):
    """What the router needs of `app.engines.registry.EngineRegistry`."""

    @property
    def roll(self) -> Roll: ...
    @property
    def problem(self) -> str | None: ...
    async def read(self) -> bool: ...
    def public_key(self, address: str) -> str | None: ...
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StepSample:
    """An engine's sums over all its steps at one moment; two of them tell what lay between."""

    engine_id: str
    steps: int
    counts: StepCounts


@dataclass
class Engine:
    """One engine as this process last saw it."""

    address: str
    client: EngineLink
    description: ModelDescription | None = None
    status: EngineStatus | None = None
    in_flight: set[str] = field(default_factory=set)
    problem: str = "it has not answered yet"
    drained: bool = False  # the operator's wish
    public_key: str | None = None  # under which it registered
    polling: asyncio.Task[None] | None = None
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    samples: deque[StepSample] = field(default_factory=lambda: deque(maxlen=SAMPLES))

    @property
    def usable(self) -> bool:
        return (
            self.description is not None
            and self.client.alive
            and not self.drained
            and not (self.status is not None and self.status.draining)
        )

    @property
    def answers(self) -> bool:
        """Whether it is there, also while it takes no new requests."""
        return self.client.alive or self.client.draining

    def candidate(self, ref: AdapterRef | None) -> Candidate:
        running, waiting = len(self.in_flight), 0
        if self.status is not None:
            waiting = self.status.waiting
            running = max(running - waiting, self.status.running)
        return Candidate(self.address, running, waiting, self.tier(ref))

    def tier(self, ref: AdapterRef | None) -> str | None:
        if ref is None or self.status is None:
            return None
        return next((r.tier for r in self.status.adapters if r.adapter == ref), None)


class EngineRouter:
    """Engines with a tokenizer that the api has not are never used.

    `load_codecs` read the base models' tokenizers (they block, so a thread runs them), the
    default one first; `remember` is awaited with every description that an engine gives, `wishes`
    every second. Engines come and go as `registry` says, beside those at `addresses`.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        load_codecs: Sequence[Callable[[], TextCodec]],
        connect: Connect,
        remember: Remember,
        wishes: Wishes | None = None,
        registry: Registry | None = None,
    ) -> None:
        self._named = frozenset(addresses)
        self._registry = registry
        self._engines = {address: Engine(address, connect(address)) for address in addresses}
        self._connect = connect
        self._load_codecs = load_codecs
        self._remember = remember
        self._wishes = wishes
        self._wake = asyncio.Event()
        self._one_reading = asyncio.Lock()
        self._codecs: dict[str, TextCodec] = {}  # by tokenizer digest, the default one first
        self._codec_problem = "the tokenizer is being read"
        self._watcher: asyncio.Task[None] | None = None

    async def start(self, *, wait_s: float = 0.0) -> None:
        """Begins to connect; waits at most `wait_s` until every engine has said how it is.

        Where no socket lies at any of their addresses, there is nothing to wait for.
        """
        for engine in self._engines.values():
            await engine.client.start()
        await self._read_registry()
        if wait_s and any(map(_may_be_there, self._engines)):
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self.refresh()
        self._watcher = asyncio.create_task(self._watch(), name="engine-watch")

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
            self._watcher = None
        for engine in self._engines.values():
            await engine.client.close()
        if self._registry is not None:
            await self._registry.close()

    @property
    def codec(self) -> TextCodec:
        """The default base model's text codec; raises Overloaded until it has been read."""
        for codec in self._codecs.values():
            return codec
        raise self._unavailable()

    def codec_of(self, description: ModelDescription) -> TextCodec:
        """The text codec of one base model; raises Overloaded until it has been read."""
        codec = self._codecs.get(description.tokenizer_digest)
        if codec is None:
            raise self._unavailable()
        return codec

    @property
    def all(self) -> list[Engine]:
        return list(self._engines.values())

    @property
    def links(self) -> Links:
        """The clients of all engines, reachable or not, as they come and go."""
        return Links(
            lambda: [engine.client for engine in self._engines.values()],
            lambda: self.registry_problem,
        )

    @property
    def registered(self) -> Mapping[str, Registered]:
        """What engines say of themselves in the registry, by address."""
        return self._registry.roll.engines if self._registry is not None else {}

    @property
    def refused(self) -> Mapping[str, str]:
        """Engines that registered and are not used, by address; why."""
        return self._registry.roll.refused if self._registry is not None else {}

    @property
    def registry_problem(self) -> str | None:
        """Why the registry cannot be read; None when it can, or there is none."""
        return self._registry.problem if self._registry is not None else None

    async def refresh(self) -> None:
        """Reads the tokenizer if that is still to do, and asks every engine how it is."""
        await self._read_registry()
        if await self._read_codecs():
            await self._read_wishes()
            await asyncio.gather(*(self._ask(engine) for engine in self._engines.values()))

    def description(self, base_digest: str | None = None) -> ModelDescription:
        """The base model that is served; raises Overloaded while no engine has described one."""
        for engine in self._engines.values():
            found = engine.description
            if found is not None and base_digest in (None, found.base_digest):
                return found
        raise self._unavailable()

    def served(self) -> dict[str, ModelDescription]:
        """The base models that engines have described, by digest."""
        found = [e.description for e in self._engines.values() if e.description is not None]
        return {description.base_digest: description for description in found}

    def choose(
        self,
        ref: AdapterRef | None,
        base_digest: str | None = None,
        *,
        key: str = "",
        besides: Collection[str] = (),
    ) -> Engine:
        """The engine of that base model which app.inference.routing picks; `besides` those.

        `key` tells requests without an adapter apart. Raises Overloaded (503) when there is none.
        """
        usable = {
            engine.address: engine
            for engine in self._engines.values()
            if engine.usable
            and engine.address not in besides
            and engine.description is not None
            and base_digest in (None, engine.description.base_digest)
        }
        if not usable:
            raise self._draining() if self._all_drain(base_digest) else self._unavailable()
        candidates = [engine.candidate(ref) for engine in usable.values()]
        name = key if ref is None else f"{ref.salt}:{ref.digest}"
        return usable[routing.choose(candidates, name).address]

    def wake(self) -> None:
        """An operator changed a wish: look at once."""
        self._wake.set()

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
        if not self._codecs:
            return self._codec_problem
        if any(engine.usable for engine in self._engines.values()):
            return None
        told = [f"{e.address}: {e.problem}" for e in self._engines.values()]
        told += [f"{address}: {why}" for address, why in self.refused.items()]
        if self.registry_problem is not None:
            told.append(self.registry_problem)
        return "; ".join(told) or "no engine has registered"

    async def _watch(self) -> None:
        while True:
            if await self._read_codecs():
                break
            await asyncio.sleep(POLL_S)
        async with asyncio.TaskGroup() as watching:  # ends once all of them have
            watching.create_task(self._watch_wishes())
            while True:
                for engine in self._engines.values():
                    if engine.polling is None:
                        engine.polling = watching.create_task(self._poll(engine))
                await asyncio.sleep(POLL_S)
                await self._read_registry()

    async def _read_registry(self) -> None:
        """Takes on engines that have registered, and lets go of those that are gone.

        One that still answers is kept, whatever the registry says, and so is one with requests.
        """
        if self._registry is None or not await self._registry.read():
            return
        found = self._registry.roll.engines
        for engine in list(self._engines.values()):
            if engine.address in self._named or engine.answers or engine.in_flight:
                continue
            known = found.get(engine.address)
            if known is None or known.line.public_key != engine.public_key:
                await self._let_go(engine)
        for address in found.keys() - self._engines.keys():
            await self._take_on(address, self._registry)

    async def _take_on(self, address: str, registry: Registry) -> None:
        try:
            engine = Engine(address, self._connect(address))
        except EngineError as error:  # this host has no CURVE keys of its own
            registry.roll.refused[address] = error.message
            return
        engine.public_key = registry.public_key(address)
        await engine.client.start()
        self._engines[address] = engine
        log.info("engine_joined", engine=address)

    async def _let_go(self, engine: Engine) -> None:
        del self._engines[engine.address]
        if engine.polling is not None:
            engine.polling.cancel()
        await engine.client.close()
        log.info("engine_left", engine=engine.address)

    async def _watch_wishes(self) -> None:
        while True:
            await self._read_wishes()
            self._wake.clear()
            try:
                async with asyncio.timeout(POLL_S):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _read_wishes(self) -> None:
        """What was last known stays while the database is away. One at a time: an older answer
        must not come after a newer one."""
        async with self._one_reading:
            await self._read_wishes_now()

    async def _read_wishes_now(self) -> None:
        if self._wishes is None:
            return
        try:
            wishes = await self._wishes(self.all)
        except (SQLAlchemyError, OSError) as error:
            log.info("wishes_not_read", error=type(error).__name__)
            return
        for engine in self._engines.values():
            changed = engine.drained != wishes.get(engine.address, False)
            engine.drained = wishes.get(engine.address, False)
            if changed:
                await self._obey(engine)

    async def _obey(self, engine: Engine) -> None:
        """Brings an engine to the operator's wish, also one that was restarted meanwhile."""
        if engine.status is None or engine.status.held == engine.drained:
            return
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                await (engine.client.drain() if engine.drained else engine.client.resume())
                engine.status = await engine.client.status()
        except (EngineError, TimeoutError) as error:
            log.info("wish_not_carried_out", engine=engine.address, error=type(error).__name__)

    async def _poll(self, engine: Engine) -> None:
        """Each engine for itself, so that one which is away delays no other's figures."""
        while True:
            await self._ask(engine)
            await asyncio.sleep(POLL_S)

    async def _read_codecs(self) -> bool:
        """All of them, or none: one that cannot be read is said until it can."""
        if not self._codecs:
            try:
                codecs = [await asyncio.to_thread(load) for load in self._load_codecs]
                self._codecs = {codec.tokenizer_digest: codec for codec in codecs}
            except (EngineError, OSError) as error:
                self._codec_problem = str(error)
        return bool(self._codecs)

    async def _ask(self, engine: Engine) -> None:
        """One at a time: an older answer must not come after a newer one."""
        async with engine.asking:
            await self._ask_now(engine)

    async def _ask_now(self, engine: Engine) -> None:
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                status = await engine.client.status()
                known = engine.status is not None and engine.status.engine_id == status.engine_id
                if engine.description is None or not known:
                    await self._accept(engine, await engine.client.describe())
                engine.status = status
                engine.samples.append(
                    StepSample(status.engine_id, status.steps, status.step_counts)
                )
            await self._obey(engine)
        except (EngineError, TimeoutError) as error:
            engine.problem = getattr(error, "message", "it does not answer")
        except (SQLAlchemyError, OSError) as error:  # asked again at the next poll
            engine.problem = f"its base model could not be noted ({type(error).__name__})"
            log.warning("base_model_not_noted", engine=engine.address, error=type(error).__name__)

    async def _accept(self, engine: Engine, description: ModelDescription) -> None:
        if description.tokenizer_digest in self._codecs:
            await self._remember(description)
            engine.description, engine.problem = description, "it is not connected"
            return
        engine.description = None
        engine.problem = (
            "the api has not the tokenizer of its base model; set LORAMUX_BASE_MODEL or "
            "LORAMUX_ENGINE_BASE_MODELS to the same files for both"
        )
        log.error("tokenizer_mismatch", engine=engine.address)

    def _unavailable(self) -> Overloaded:
        return Overloaded(
            "no engine can take the request now; retry in a few seconds",
            code="engine_unavailable",
            retry_after_ms=2000,
        )

    def _all_drain(self, base_digest: str | None) -> bool:
        """Whether those of that base that are there are all being drained."""
        there = [
            engine
            for engine in self._engines.values()
            if engine.description is not None
            and base_digest in (None, engine.description.base_digest)
        ]
        return bool(there) and all(
            engine.drained or (engine.status is not None and engine.status.draining)
            for engine in there
        )

    def _draining(self) -> Overloaded:
        return Overloaded(
            "the engines of this model are being drained; retry in a few seconds",
            code="draining",
            retry_after_ms=5000,
        )


def _may_be_there(address: str) -> bool:
    """An engine on this machine that listens has its socket there."""
    path = address.removeprefix("ipc://")
    return path == address or Path(path).exists()
