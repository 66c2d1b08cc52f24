"""The api's side of one engine, on asyncio: streams, questions, and knowing whether it is alive.

One task per connection receives, pings and watches. When the connection is lost, everything in
flight fails with EngineUnavailable and a new connection is tried until `close`.
"""

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from engine import wire
from engine.clock import Clock, SystemClock
from engine.curve import CurveKeyError, CurveKeys, create_curve_keys, load_client_curve
from engine.errors import EngineError, EngineUnavailable, NotStarted, RequestRefused
from engine.ipc import ipc_path
from engine.types import (
    PROTOCOL_VERSION,
    AdapterRef,
    EngineStatus,
    GenerateRequest,
    JournalEntry,
    ModelDescription,
    RequestOutput,
)

__all__ = [
    "ClientTimes",
    "CurveKeyError",
    "CurveKeys",
    "EngineClient",
    "create_curve_keys",
    "load_client_curve",
]

MAX_BUFFERED_OUTPUTS = 10_000
"""Outputs of one request that may wait for its reader; a slower reader loses the request."""

RECEIVE_BATCH = 64
"""Messages that are taken in before other tasks run."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClientTimes:
    """How long the client waits for what."""

    connect_s: float = 5.0  # for an engine that has not answered yet
    dead_after_s: float = 5.0  # without a beat
    hung_after_s: float = 30.0  # beats, work pending, but the step loop stands still
    call_s: float = 15.0  # for the answer to a question
    retry_s: float = 0.2  # between two connections


@dataclass(slots=True)
class _Stream:
    """What has arrived for one request and was not read yet."""

    arrived: deque[RequestOutput | EngineError] = field(default_factory=deque)
    reader: asyncio.Future[None] | None = None  # waits for the next one

    def put(self, arrived: RequestOutput | EngineError) -> None:
        self.arrived.append(arrived)
        if self.reader is not None and not self.reader.done():
            self.reader.set_result(None)

    async def get(self) -> RequestOutput | EngineError:
        while not self.arrived:
            self.reader = asyncio.get_running_loop().create_future()
            await self.reader
        return self.arrived.popleft()


class _Lost(Exception):
    """The connection is of no more use; the text says why."""


class EngineClient:
    """Safe for many concurrent requests of one event loop."""

    def __init__(
        self,
        address: str,
        *,
        curve: CurveKeys | None = None,
        times: ClientTimes | None = None,
        clock: Clock | None = None,
    ) -> None:
        ipc_path(address)  # refuses a path that is too long
        self.address = address
        self._curve = curve
        self._times = times or ClientTimes()
        self._clock = clock or SystemClock()
        self._streams: dict[str, _Stream] = {}
        self._calls: dict[int, asyncio.Future[wire.Reply]] = {}
        self._numbers = itertools.count(1)
        self._outgoing: asyncio.Queue[wire.ClientMessage] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._context: zmq.asyncio.Context | None = None
        self._description: ModelDescription | None = None
        self._why = "the engine has not answered yet"
        self._welcome: wire.Welcome | None = None
        self._beat: wire.Beat | None = None
        self._heard_ms = self._beaten_ms = self._moved_ms = self._clock.now_ms()

    # ---------------------------------------------------------------------- life

    async def start(self) -> None:
        """Begins to connect; does not wait for the engine."""
        self._context = zmq.asyncio.Context()
        self._task = asyncio.create_task(self._keep_connected(), name=f"engine {self.address}")

    async def close(self) -> None:
        """Ends the connection; what is in flight fails and is cancelled in the engine."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        self._fail_everything("the client was closed")
        if self._context is not None:
            self._context.destroy(linger=200)
            self._context = None

    @property
    def alive(self) -> bool:
        """Whether the engine takes new requests: connected, loaded, not hung, not draining."""
        return self._ready and not (self.hung or self.draining)

    @property
    def _ready(self) -> bool:
        return self._beat is not None and self._beat.ready

    @property
    def hung(self) -> bool:
        """Whether the engine beats but has stood still in the middle of its work for too long."""
        stood_s = (self._beaten_ms - self._moved_ms) / 1000
        return self._beat is not None and self._beat.pending and stood_s > self._times.hung_after_s

    @property
    def draining(self) -> bool:
        return self._beat is not None and self._beat.draining

    @property
    def engine_id(self) -> str | None:
        """Of the engine that is connected now; a new one means that it was restarted."""
        return self._welcome.engine_id if self._welcome is not None else None

    # ---------------------------------------------------------------------- requests

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        """The request's outputs up to the one that has `usage`.

        Raises RequestRefused or AdapterRefused when the engine refuses it, NotStarted when it is
        not there or takes no new ones, EngineUnavailable when it dies, hangs or loses a message.
        Closing the iterator early cancels the request.
        """
        try:
            wire.check(wire.Generate(request))
        except wire.WireError as error:
            raise RequestRefused(str(error)) from None
        try:
            await self._until(lambda: self.alive, self._patience_s())
        except EngineUnavailable as error:
            raise NotStarted(error.message, code=error.code) from None
        if request.request_id in self._streams:
            raise RequestRefused(
                "a request with this id is running already", code="duplicate_request_id"
            )
        stream = self._streams[request.request_id] = _Stream()
        self._outgoing.put_nowait(wire.Generate(request))
        ended = False
        try:
            sequence = 0
            while not ended:
                arrived = await stream.get()
                if isinstance(arrived, EngineError):
                    ended = not isinstance(arrived, EngineUnavailable)
                    raise arrived
                if arrived.sequence != sequence:
                    raise EngineUnavailable(
                        "a message of the engine was lost", code="engine_message_lost"
                    )
                sequence += 1
                ended = arrived.usage is not None
                yield arrived
        finally:
            del self._streams[request.request_id]
            if not ended and self._welcome is not None:
                self._outgoing.put_nowait(wire.Cancel(request.request_id))

    def unread(self, request_id: str) -> int:
        """Outputs of a request that are here already."""
        stream = self._streams.get(request_id)
        return 0 if stream is None else len(stream.arrived)

    async def cancel(self, request_id: str, choice: int | None = None) -> None:
        """Ends a request early, or one choice of it alone.

        The iterator still brings the last output of what was ended; the request's has the usage.
        """
        if self._welcome is not None:
            self._outgoing.put_nowait(wire.Cancel(request_id, choice))

    # ---------------------------------------------------------------------- questions

    async def describe(self, timeout_s: float = 60.0) -> ModelDescription:
        """The base model; waits up to `timeout_s` for an engine that is still loading."""
        await self._until(lambda: self._ready and not self.hung, 0.0 if self.hung else timeout_s)
        if self._description is None:
            self._description = (await self._ask("describe")).description
        assert self._description is not None
        return self._description

    async def status(self) -> EngineStatus:
        """Answered between two steps."""
        status = (await self._ask("status")).status
        assert status is not None
        return status

    async def forget(self, ref: AdapterRef) -> bool:
        """Drops an adapter from every tier and the prefix cache; True once nothing is left."""
        return bool((await self._ask("forget", adapter=ref)).forgotten)

    async def drain(self) -> None:
        """The engine refuses new requests until `resume`; those that it has run to their end."""
        await self._ask("drain")

    async def resume(self) -> None:
        await self._ask("resume")

    async def journal(self, request_ids: Iterable[str]) -> list[JournalEntry]:
        """Token counts of those requests that the engine still keeps."""
        return (await self._ask("journal", request_ids=list(request_ids))).entries or []

    async def acknowledge(self, request_ids: Iterable[str]) -> None:
        """Lets the engine's journal forget these: they are in the ledger."""
        await self._ask("acknowledge", request_ids=list(request_ids))

    async def _ask(
        self,
        name: wire.CallName,
        adapter: AdapterRef | None = None,
        request_ids: list[str] | None = None,
    ) -> wire.Reply:
        await self._until(lambda: self._beat is not None, self._times.connect_s)
        number = next(self._numbers)
        answer: asyncio.Future[wire.Reply] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        self._outgoing.put_nowait(wire.Call(number, name, adapter, request_ids))
        try:
            async with asyncio.timeout(self._times.call_s):
                return await answer
        except TimeoutError:
            raise EngineUnavailable(
                f"the engine gave no answer within {self._times.call_s:g} s", code="engine_hung"
            ) from None
        finally:
            self._calls.pop(number, None)

    # ---------------------------------------------------------------------- the connection

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    if self._task is None:
                        raise EngineUnavailable("the client is not started")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise self._unavailable() from None

    def _patience_s(self) -> float:
        """How long a request waits for an engine that does not take it now."""
        return 0.0 if self.hung or self.draining else self._times.connect_s

    def _unavailable(self) -> EngineUnavailable:
        if self.hung:
            return EngineUnavailable("the engine hangs", code="engine_hung")
        if self.draining:
            return EngineUnavailable("the engine takes no new requests now", code="draining")
        if self._beat is not None:
            return EngineUnavailable("the engine is still loading", code="engine_loading")
        return EngineUnavailable(self._why)

    async def _keep_connected(self) -> None:
        while True:
            try:
                await self._connect_once()
            except _Lost as lost:
                self._why = str(lost)
            except zmq.ZMQError as error:
                self._why = f"the connection to the engine failed: {error}"
            self._fail_everything(self._why)
            await asyncio.sleep(self._times.retry_s)

    async def _connect_once(self) -> None:
        """One connection from hello to its loss, which is the only way out: raises _Lost."""
        assert self._context is not None
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for an engine that is not there
        dealer.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
        dealer.setsockopt(zmq.LINGER, 200)
        dealer.setsockopt(zmq.RECONNECT_IVL, 50)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if self._curve is not None:
            dealer.setsockopt(zmq.CURVE_SERVERKEY, self._curve.server_public.encode())
            dealer.setsockopt(zmq.CURVE_PUBLICKEY, self._curve.pair.public.encode())
            dealer.setsockopt(zmq.CURVE_SECRETKEY, self._curve.pair.secret.encode())
        monitor = dealer.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )
        tasks: list[asyncio.Task[None]] = []
        try:
            dealer.connect(self.address)
            tasks = [
                asyncio.create_task(self._send_loop(dealer)),
                asyncio.create_task(self._receive_loop(dealer)),
                asyncio.create_task(self._watch_socket(monitor)),
                asyncio.create_task(self._watch_beats()),
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            try:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:  # also when `close` cancels while a loss is being cleared away
                self._hang_up(dealer, monitor)

    def _hang_up(self, dealer: "zmq.asyncio.Socket", monitor: "zmq.asyncio.Socket") -> None:
        if self._welcome is not None:
            with contextlib.suppress(zmq.ZMQError):
                zmq.Socket.shadow(dealer.underlying).send_multipart(
                    wire.encode(wire.Bye()), zmq.NOBLOCK
                )
        dealer.disable_monitor()
        monitor.close(linger=0)
        dealer.close()

    async def _send_loop(self, dealer: "zmq.asyncio.Socket") -> None:
        self._outgoing = asyncio.Queue()
        hello = wire.Hello(PROTOCOL_VERSION, secrets.token_hex(8))
        await dealer.send_multipart(wire.encode(hello))
        while True:
            await dealer.send_multipart(wire.encode(await self._outgoing.get()))

    async def _receive_loop(self, dealer: "zmq.asyncio.Socket") -> None:
        """Takes all that is there before any reader runs: who lags behind catches up at once."""
        at_once: zmq.Socket[bytes] = zmq.Socket.shadow(dealer.underlying)
        while True:
            frames = await dealer.recv_multipart()
            with contextlib.suppress(zmq.Again):
                for _ in range(RECEIVE_BATCH):
                    self._take(_read(frames))
                    frames = at_once.recv_multipart(zmq.NOBLOCK)
                self._take(_read(frames))

    async def _watch_socket(self, monitor: "zmq.asyncio.Socket") -> None:
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise _Lost("the engine refuses this client's key: add it to clients.allowed")
            if self._welcome is not None:
                raise _Lost("the engine's process has ended")

    async def _watch_beats(self) -> None:
        """Pings, and notices silence and hangs. Its own delay is no silence of the engine's."""
        opened_ms = self._clock.now_ms()
        while True:
            interval_s = self._welcome.beat_ms / 1000 if self._welcome is not None else 0.1
            slept_from = self._clock.now_ms()
            await asyncio.sleep(interval_s)
            now_ms = self._clock.now_ms()
            if now_ms - slept_from > 2000 * interval_s + 1000:
                self._heard_ms = max(self._heard_ms, now_ms)  # what came meanwhile is unread yet
            if self._welcome is None:
                if self._connected_too_long(opened_ms, now_ms):
                    raise _Lost("the engine does not answer")
                continue
            self._outgoing.put_nowait(wire.Ping())
            if now_ms - self._heard_ms > self._times.dead_after_s * 1000:
                raise _Lost("the engine gives no sign of life")
            if self.hung:
                self._fail_requests(self._unavailable())

    def _connected_too_long(self, opened_ms: float, now_ms: float) -> bool:
        return now_ms - opened_ms > 2000 * self._times.dead_after_s

    # ---------------------------------------------------------------------- what arrives

    def _take(self, message: wire.EngineMessage) -> None:
        self._heard_ms = self._clock.now_ms()
        match message:
            case wire.Outputs(outputs):
                for output in outputs:
                    self._deliver(output.request_id, output)
            case wire.Beat():
                if self._beat is None or message.turns != self._beat.turns or not message.pending:
                    self._moved_ms = self._heard_ms
                self._beat, self._beaten_ms = message, self._heard_ms
                self._changed.set()
            case wire.Welcome(protocol):
                if protocol != PROTOCOL_VERSION:
                    raise _Lost(
                        f"the engine speaks protocol {protocol} and this client "
                        f"{PROTOCOL_VERSION}: run the same version of both"
                    )
                self._welcome = message
            case wire.Refused(request_id, problem):
                self._deliver(request_id, wire.to_error(problem))
            case wire.Reply(number):
                self._answer(number, message)
            case wire.Failed(number, problem):
                self._answer(number, wire.to_error(problem))
            case wire.Stranger():
                raise _Lost("the engine has ended this client's session")

    def _deliver(self, request_id: str, arrived: RequestOutput | EngineError) -> None:
        stream = self._streams.get(request_id)
        if stream is None:
            return
        if len(stream.arrived) < MAX_BUFFERED_OUTPUTS:
            stream.put(arrived)
        elif len(stream.arrived) == MAX_BUFFERED_OUTPUTS:
            stream.put(
                EngineUnavailable("the reader is too slow for this answer", code="reader_too_slow")
            )
            self._outgoing.put_nowait(wire.Cancel(request_id))

    def _answer(self, number: int, answer: wire.Reply | EngineError) -> None:
        waiting = self._calls.get(number)
        if waiting is None or waiting.done():
            return
        if isinstance(answer, EngineError):
            waiting.set_exception(answer)
        else:
            waiting.set_result(answer)

    # ---------------------------------------------------------------------- loss

    def _forget_connection(self) -> None:
        self._welcome = self._beat = None
        self._heard_ms = self._beaten_ms = self._moved_ms = self._clock.now_ms()
        self._description = None
        self._changed.set()

    def _fail_everything(self, why: str) -> None:
        self._forget_connection()
        self._fail_requests(EngineUnavailable(why))
        for number in list(self._calls):
            self._answer(number, EngineUnavailable(why))

    def _fail_requests(self, error: EngineUnavailable) -> None:
        for request_id, stream in self._streams.items():
            if len(stream.arrived) <= MAX_BUFFERED_OUTPUTS:
                stream.put(EngineUnavailable(error.message, code=error.code))
                _log.warning("a request fails: %s", error.code, extra={"request_id": request_id})


def _read(frames: list[bytes]) -> wire.EngineMessage:
    try:
        return wire.decode_from_engine(frames)
    except wire.WireError as error:
        raise _Lost(f"the engine sent what this client does not read: {error}") from error
