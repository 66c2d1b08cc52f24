"""The engine's main thread: takes commands, steps the core while it has work, posts what came."""

import queue
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from engine import wire
from engine.clock import Clock
from engine.errors import EngineError, NotStarted
from engine.sessions import Peer
from engine.types import AdapterRef, EngineStatus, GenerateRequest, RequestOutput, SamplingParams

IDLE_WAIT_S = 0.5
"""Longest sleep of an idle step loop; a command wakes it at once."""
EMPTY_STEP_MS = 0.5
"""A step that took less and brought nothing ran nothing: adapters are still being loaded."""
EMPTY_WAIT_S = 0.002
"""Pause after such a step."""


class Core(Protocol):
    """What the process needs of EngineCore."""

    @property
    def has_work(self) -> bool: ...
    def submit(self, request: GenerateRequest) -> None: ...
    def cancel(self, request_id: str, choice: int | None = None) -> None: ...
    def step(self) -> list[RequestOutput]: ...
    def status(self) -> EngineStatus: ...
    def forget(self, ref: AdapterRef) -> bool: ...
    def drain(self) -> None: ...


# --------------------------------------------------------------------------- commands and mail


@dataclass(frozen=True, slots=True)
class Submit:
    request: GenerateRequest


@dataclass(frozen=True, slots=True)
class Withdraw:
    request_id: str
    choice: int | None = None  # None: all of them


@dataclass(frozen=True, slots=True)
class AskStatus:
    peer: Peer
    number: int


@dataclass(frozen=True, slots=True)
class TellStatus:
    """The same for another thread of this process."""

    tell: Callable[[EngineStatus], None]


@dataclass(frozen=True, slots=True)
class Forget:
    peer: Peer
    number: int
    adapter: AdapterRef


@dataclass(frozen=True, slots=True)
class Hold:
    """An operator's drain, or the end of it; the process goes on."""

    peer: Peer
    number: int
    held: bool


@dataclass(frozen=True, slots=True)
class Drain:
    """The process ends once what it has is done."""


Command = Submit | Withdraw | AskStatus | TellStatus | Forget | Hold | Drain


@dataclass(frozen=True, slots=True)
class RefusedMail:
    request_id: str
    error: EngineError


Mail = list[RequestOutput] | RefusedMail | tuple[Peer, wire.Reply]


class StepLoop:
    """Feeds the core and steps it while it has work. `turns` and `busy` are read by the beat."""

    def __init__(self, core: Core, engine_id: str, post: Callable[[Mail], None], clock: Clock):
        self._core = core
        self._engine_id = engine_id
        self._post = post
        self._clock = clock
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.turns = 0
        self.busy = True
        self.ending = False
        self.held = False

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self.ending or self.held

    def warm_up(self, prompt_tokens: int = 32) -> None:
        """Runs one small request, so that the first real one meets no first-time cost.

        Raises EngineError when even that fails.
        """
        request = GenerateRequest(
            request_id=f"warm-up-{self._engine_id}",
            tenant="system",
            prompt=[index % 8 for index in range(prompt_tokens)],
            sampling=SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True),
            cache_salt=secrets.token_hex(16),
            system=True,
        )
        self._core.submit(request)
        while self._core.has_work:
            for output in self._core.step():
                if output.error_code is not None:
                    raise EngineError(f"the warm-up step failed: {output.error_message}")

    def run(self, drain_ms: float) -> None:
        """Returns when a drain is over: all work done, or `drain_ms` after it was asked for."""
        deadline: float | None = None
        while True:
            self._take_commands(wait_s=0.0 if self._core.has_work else IDLE_WAIT_S)
            if self.ending:
                deadline = deadline or self._clock.now_ms() + drain_ms
                if not self._core.has_work or self._clock.now_ms() >= deadline:
                    return
            if self._core.has_work:
                self._step()

    def _step(self) -> None:
        started_ms = self._clock.now_ms()
        outputs = self._core.step()
        self.turns += 1
        if outputs:
            self._post(outputs)
        elif self._clock.now_ms() - started_ms < EMPTY_STEP_MS:
            self._take_commands(wait_s=EMPTY_WAIT_S)

    def _take_commands(self, wait_s: float) -> None:
        """Handles what has come, waiting up to `wait_s` for the first."""
        try:
            if wait_s:
                self.busy = self._core.has_work
                command = self.commands.get(timeout=wait_s)
                self.busy = True
            else:
                command = self.commands.get_nowait()
            while True:
                self._handle(command)
                self.turns += 1
                command = self.commands.get_nowait()
        except queue.Empty:
            return

    def _handle(self, command: Command) -> None:
        match command:
            case Submit(request):
                self._submit(request)
            case Withdraw(request_id, choice):
                self._core.cancel(request_id, choice)
            case AskStatus(peer, number):
                self._post((peer, wire.Reply(number, status=self._status())))
            case TellStatus(tell):
                tell(self._status())
            case Forget(peer, number, adapter):
                forgotten = self._core.forget(adapter)
                self._post((peer, wire.Reply(number, forgotten=forgotten)))
            case Hold(peer, number, held):
                self.held = held
                self._post((peer, wire.Reply(number)))
            case Drain():
                self.ending = True
                self._core.drain()

    def _status(self) -> EngineStatus:
        return replace(
            self._core.status(),
            engine_id=self._engine_id,
            draining=self.draining,
            held=self.held,
        )

    def _submit(self, request: GenerateRequest) -> None:
        try:
            if self.draining:
                raise NotStarted("the engine takes no new requests now", code="draining")
            self._core.submit(request)
        except EngineError as error:
            self._post(RefusedMail(request.request_id, error))
