"""The engine's second thread: sockets, sessions, heartbeat and journal.

It beats whatever the step loop does; a beat says how often the loop has turned and whether it has
work, so that a hung loop can be told from a dead process.
"""

import logging
import socket
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import zmq

from engine import wire
from engine.clock import Clock
from engine.curve import EngineCurve
from engine.errors import EngineError, EngineUnavailable, NotStarted, RequestRefused
from engine.ipc import AddressRefused
from engine.journal import Journal
from engine.request_trace import RequestTraces
from engine.sessions import Peer, Sessions
from engine.step_loop import (
    AskStatus,
    Forget,
    Hold,
    Mail,
    RefusedMail,
    StepLoop,
    Submit,
    Withdraw,
)
from engine.tracing import Tracing
from engine.types import PROTOCOL_VERSION, GenerateRequest, ModelDescription
from engine.zap import DOMAIN, ZapGate

_RECEIVE_BATCH = 256

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """`listen` is ipc://path (in a 0700 folder) or tcp://host:port (with `curve`)."""

    listen: str
    journal_path: Path
    curve: EngineCurve | None = None
    beat_ms: float = 500.0
    client_timeout_ms: float = 10_000.0
    drain_ms: float = 20_000.0
    outbox_messages: int = 2_000  # unread messages after which a client is dropped
    registry_url: str | None = None  # redis://; None: clients know the address by themselves
    advertise: str | None = None  # what is registered instead of `listen`
    lease_ms: float = 10_000.0
    tracing: Tracing | None = None


class IoThread(threading.Thread):
    """Owns the sockets, the sessions and the journal."""

    def __init__(self, options: ServerOptions, engine_id: str, journal: Journal, clock: Clock):
        super().__init__(name="engine-io", daemon=True)
        self._options = options
        self._engine_id = engine_id
        self._journal = journal
        self._clock = clock
        self._sessions = Sessions(options.client_timeout_ms)
        tracing = options.tracing
        self._traces = RequestTraces(tracing, engine_id, clock) if tracing is not None else None
        self._loop: StepLoop | None = None
        self._description: ModelDescription | None = None
        self._mail: deque[Mail] = deque()
        self._closing = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gate: ZapGate | None = None
        try:
            self._router = self._bind()
        except EngineError:
            self._context.destroy(linger=0)
            raise
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)

    # ---------------------------------------------------------------------- from the main thread

    def ready(self, loop: StepLoop, description: ModelDescription) -> None:
        """From now on requests and questions are taken."""
        self._loop, self._description = loop, description
        self._wake()

    def post(self, mail: Mail) -> None:
        self._mail.append(mail)
        self._wake()

    def close(self) -> None:
        """Sends what is left, then ends the thread."""
        self._closing.set()
        self._wake()
        self.join()

    def _wake(self) -> None:
        try:
            self._wake_write.send(b"!")
        except BlockingIOError:
            return  # the pipe is full of wake-ups already

    # ---------------------------------------------------------------------- the thread

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        if self._gate is not None:
            poller.register(self._gate.socket, zmq.POLLIN)
        next_beat = self._clock.now_ms()
        while not self._closing.is_set():
            wait_ms = max(0, int(next_beat - self._clock.now_ms()) + 1)
            events = dict(poller.poll(wait_ms))
            if self._gate is not None and self._gate.socket in events:
                self._gate.answer()
            if self._wake_read.fileno() in events or self._wake_read in events:
                self._clear_wake_ups()
            self._send_mail()
            if self._router in events:
                self._receive()
            if self._clock.now_ms() >= next_beat:
                self._beat()
                next_beat = self._clock.now_ms() + self._options.beat_ms
        self._send_mail()
        self._beat()
        if self._options.tracing is not None:
            self._options.tracing.close()
        self._router.close(linger=1000)
        if self._gate is not None:
            self._gate.close()
        self._context.term()
        self._wake_read.close()
        self._wake_write.close()

    def _bind(self) -> "zmq.Socket[bytes]":
        options = self._options
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
        router.setsockopt(zmq.SNDHWM, options.outbox_messages)
        router.setsockopt(zmq.LINGER, 0)
        if options.listen.startswith("tcp://"):
            if options.curve is None:
                raise AddressRefused(
                    "an engine on tcp needs CURVE keys: `loramux secrets init` makes them"
                )
            self._gate = ZapGate(self._context, options.curve.allowed)
            router.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.CURVE_SECRETKEY, options.curve.pair.secret.encode())
            router.setsockopt(zmq.HEARTBEAT_IVL, 2_000)
            router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
        elif not options.listen.startswith("ipc://"):
            raise AddressRefused(
                f"{options.listen[:60]!r} is neither ipc://path nor tcp://host:port"
            )
        try:
            router.bind(options.listen)
        except zmq.ZMQError as error:
            raise AddressRefused(f"cannot listen on {options.listen}: {error}") from error
        return router

    def _clear_wake_ups(self) -> None:
        try:
            while len(self._wake_read.recv(4096)) == 4096:
                continue
        except BlockingIOError:
            return

    # ---------------------------------------------------------------------- receiving

    def _receive(self) -> None:
        for _ in range(_RECEIVE_BATCH):
            try:
                peer, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._take(peer, wire.decode_from_client(frames))
            except wire.WireError as error:
                _log.warning("ignored a message: %s", error)

    def _take(self, peer: Peer, message: wire.ClientMessage) -> None:
        if isinstance(message, wire.Hello):
            self._welcome(peer, message)
        elif not self._sessions.seen(peer, self._clock.now_ms()):
            self._try_send(peer, wire.Stranger())
        elif isinstance(message, wire.Bye):
            self._withdraw(self._sessions.end(peer))
        elif isinstance(message, wire.Generate):
            self._generate(peer, message.request)
        elif isinstance(message, wire.Cancel):
            if self._sessions.owns(peer, message.request_id) and self._loop is not None:
                self._loop.commands.put(Withdraw(message.request_id, message.choice))
        elif isinstance(message, wire.Call):
            try:
                self._answer(peer, message)
            except EngineError as error:
                self._send(peer, wire.Failed(message.number, wire.to_problem(error)))

    def _welcome(self, peer: Peer, hello: wire.Hello) -> None:
        if hello.protocol == PROTOCOL_VERSION:
            self._withdraw(self._sessions.open(peer, hello.client_id, self._clock.now_ms()))
        self._try_send(peer, wire.Welcome(PROTOCOL_VERSION, self._engine_id, self._options.beat_ms))
        self._try_send(peer, self._beat_message())

    def _generate(self, peer: Peer, request: GenerateRequest) -> None:
        error: EngineError
        if self._loop is None:
            error = NotStarted("the engine is still loading", code="engine_loading")
        elif not self._sessions.claim(peer, request.request_id):
            error = RequestRefused(
                "a request with this id is running already", code="duplicate_request_id"
            )
        else:
            self._journal.begin(request.request_id, len(request.prompt))
            if self._traces is not None:
                self._traces.begin(request)
            self._loop.commands.put(Submit(request))
            return
        self._send(peer, wire.Refused(request.request_id, wire.to_problem(error)))

    def _answer(self, peer: Peer, call: wire.Call) -> None:
        ids = call.request_ids or []
        if call.name == "journal":
            self._send(peer, wire.Reply(call.number, entries=self._journal.entries(ids)))
            return
        if call.name == "acknowledge":
            self._journal.acknowledge(ids)
            self._send(peer, wire.Reply(call.number))
            return
        if self._loop is None:
            raise EngineUnavailable("the engine is still loading", code="engine_loading")
        if call.name == "describe":
            self._send(peer, wire.Reply(call.number, description=self._description))
        elif call.name == "status":
            self._loop.commands.put(AskStatus(peer, call.number))
        elif call.name in ("drain", "resume"):
            self._loop.commands.put(Hold(peer, call.number, held=call.name == "drain"))
        elif call.adapter is None:
            raise RequestRefused("forget needs an adapter", field="adapter")
        else:
            self._loop.commands.put(Forget(peer, call.number, call.adapter))

    # ---------------------------------------------------------------------- sending

    def _send_mail(self) -> None:
        """All that has been posted; outputs become one message a client."""
        while self._mail:
            mail = self._mail.popleft()
            if isinstance(mail, RefusedMail):
                self._journal.drop(mail.request_id)
                if self._traces is not None:
                    self._traces.drop(mail.request_id)
                peer = self._sessions.release(mail.request_id)
                if peer is not None:
                    self._send(peer, wire.Refused(mail.request_id, wire.to_problem(mail.error)))
            elif isinstance(mail, tuple):
                self._send(*mail)
            else:
                self._journal.record(mail)
                if self._traces is not None:
                    self._traces.record(mail)
                for owner, outputs in self._sessions.route(mail).items():
                    self._send(owner, wire.Outputs(outputs))

    def _beat(self) -> None:
        message = self._beat_message()
        for peer in self._sessions.silent(self._clock.now_ms()):
            _log.warning("a client has been silent for too long; its requests are cancelled")
            self._withdraw(self._sessions.end(peer))
        for peer in self._sessions.peers:
            self._send(peer, message)

    def _beat_message(self) -> wire.Beat:
        loop = self._loop
        if loop is None:
            return wire.Beat(self._engine_id, ready=False, turns=0, pending=False, draining=False)
        pending = loop.busy or not loop.commands.empty()
        return wire.Beat(self._engine_id, True, loop.turns, pending, loop.draining)

    def _send(self, peer: Peer, message: wire.EngineMessage) -> None:
        """A client that is gone, or that has left too much unread, loses its session."""
        problem = self._try_send(peer, message)
        if problem is not None:
            orphans = self._sessions.end(peer)
            if orphans:
                _log.warning("a client %s; %d requests are cancelled", problem, len(orphans))
            self._withdraw(orphans)

    def _try_send(self, peer: Peer, message: wire.EngineMessage) -> str | None:
        try:
            self._router.send_multipart([peer, *wire.encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            return "does not read its messages"
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return "is gone"
        return None

    def _withdraw(self, request_ids: list[str]) -> None:
        if self._loop is not None:
            for request_id in request_ids:
                self._loop.commands.put(Withdraw(request_id))
