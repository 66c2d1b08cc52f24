"""A generator without a model, behind two faces: the engine's ZeroMQ protocol and OpenAI's HTTP.

    python -m benchmarks.gateway_parts.stub ipc://PATH HTTP_PORT

Each step brings every running request one token, whichever face it came through, and steps follow
one another as fast as they can. It keeps no journal and refuses nothing.
"""

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import uvloop
import zmq

from app.settings import packaged_base_model
from engine import wire
from engine.ipc import IpcLock, ipc_path
from engine.text import TextCodec
from engine.types import (
    PROTOCOL_VERSION,
    EngineStatus,
    GenerateRequest,
    ModelDescription,
    RequestOutput,
    RequestUsage,
)

NAME = "stub"
TEXT = (
    "It is a fine day for a walk along the harbour: the boats have come in, the market is open "
    "until noon, and the old lighthouse can be visited for the price of a cup of coffee. "
)
DEFAULT_TOKENS = 16
BEAT_S = 0.5


def describe(codec: TextCodec) -> ModelDescription:
    """The real base model's tokenizer, so that the api reads and writes real text."""
    return ModelDescription(
        name=NAME,
        architecture="llama",
        base_digest="57" * 32,
        tokenizer_digest=codec.tokenizer_digest,
        modules=(),
        layers=1,
        hidden_size=8,
        vocab_size=codec.vocab_size,
        context_length=8192,
        max_rank=256,
        eos_token_ids=(2,),
        kv_block_bytes=1024,
        adapter_dtype="fp32",
        backend="stub",
    )


def answer_text(codec: TextCodec, tokens: int) -> str:
    """What an answer of so many tokens says."""
    ids = codec.encode(TEXT)
    return codec.decode([ids[index % len(ids)] for index in range(tokens)])


@dataclass(slots=True)
class Running:
    """One request; `emit(number, last)` sends its token of that number."""

    tokens: int
    emit: Callable[[int, bool], None]
    made: int = 0


class Generator:
    """Steps while something runs."""

    def __init__(self) -> None:
        self.running: dict[object, Running] = {}
        self.after_step: Callable[[], None] = lambda: None
        self.steps = 0
        self._stepping = False

    def start(self, key: object, request: Running) -> None:
        self.running[key] = request
        if not self._stepping:
            self._stepping = True
            asyncio.get_running_loop().call_soon(self._step)

    def _step(self) -> None:
        self.steps += 1
        for key, request in list(self.running.items()):
            request.made += 1
            last = request.made >= request.tokens
            if last:
                del self.running[key]
            request.emit(request.made - 1, last)
        self.after_step()
        self._stepping = bool(self.running)
        if self._stepping:
            asyncio.get_running_loop().call_soon(self._step)


# --------------------------------------------------------------------------- ZeroMQ


@dataclass
class EngineFace:
    """What `engine.client.EngineClient` talks to."""

    address: str
    description: ModelDescription
    ids: list[int]
    generator: Generator
    mail: dict[bytes, list[RequestOutput]] = field(default_factory=dict)

    def open(self) -> None:
        path = ipc_path(self.address)
        assert path is not None
        self._lock = IpcLock(path)
        self._peers: set[bytes] = set()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.SNDHWM, 0)
        self._router.bind(self.address)
        self.generator.after_step = self._send_mail
        descriptor = int(self._router.getsockopt(zmq.FD))
        asyncio.get_running_loop().add_reader(descriptor, self._receive)

    async def beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            for peer in self._peers:
                self._send(peer, self._beat())
            self._receive()

    def _beat(self) -> wire.Beat:
        generator = self.generator
        return wire.Beat("stub", True, generator.steps, bool(generator.running), False)

    def _receive(self) -> None:
        """The descriptor tells of changes alone: everything that is there has to be read."""
        while True:
            try:
                peer, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(peer, wire.decode_from_client(frames))

    def _take(self, peer: bytes, message: wire.ClientMessage) -> None:
        match message:
            case wire.Hello():
                self._peers.add(peer)
                self._send(peer, wire.Welcome(PROTOCOL_VERSION, "stub", BEAT_S * 1000))
                self._send(peer, self._beat())
            case wire.Bye():
                self._peers.discard(peer)
            case wire.Generate(request):
                self._generate(peer, request)
            case wire.Cancel(request_id):
                running = self.generator.running.get(request_id)
                if running is not None:
                    running.tokens = running.made + 1
            case wire.Call(number, "describe"):
                self._send(peer, wire.Reply(number, description=self.description))
            case wire.Call(number, "status"):
                self._send(peer, wire.Reply(number, status=self._status()))
            case wire.Call(number, "journal"):
                self._send(peer, wire.Reply(number, entries=[]))
            case wire.Call(number):
                self._send(peer, wire.Reply(number, forgotten=True))

    def _generate(self, peer: bytes, request: GenerateRequest) -> None:
        request_id, prompt = request.request_id, len(request.prompt)
        ids = self.ids

        def emit(number: int, last: bool) -> None:
            usage = RequestUsage(prompt, 0, number + 1, 0.1, 0.0, 0.2, 1.0) if last else None
            self.mail.setdefault(peer, []).append(
                RequestOutput(
                    request_id,
                    number,
                    token_ids=[ids[number % len(ids)]],
                    finish="length" if last else None,
                    usage=usage,
                )
            )

        self.generator.start(request_id, Running(request.sampling.max_tokens, emit))

    def _send_mail(self) -> None:
        mail, self.mail = self.mail, {}
        for peer, outputs in mail.items():
            self._send(peer, wire.Outputs(outputs))
        self._receive()

    def _send(self, peer: bytes, message: wire.EngineMessage) -> None:
        self._router.send_multipart([peer, *wire.encode(message)])

    def _status(self) -> EngineStatus:
        return EngineStatus(
            engine_id="stub",
            base_digest=self.description.base_digest,
            uptime_ms=1.0,
            running=len(self.generator.running),
            waiting=0,
            waiting_by_tenant={},
            steps=self.generator.steps,
            step_ms_p50=1.0,
            kv_blocks_used=0,
            kv_blocks_cached=0,
            extents_total=1,
            extent_bytes=1024,
            device_adapter_bytes=0,
            host_adapter_bytes=0,
            host_budget_bytes=0,
            adapters=[],
            prompt_tokens_total=0,
            completion_tokens_total=0,
            preemptions_total=0,
            draining=False,
        )


# --------------------------------------------------------------------------- HTTP


class HttpFace(asyncio.Protocol):
    """POST anything: an answer as OpenAI's chat API gives it, streamed when the body says so."""

    def __init__(self, generator: Generator, pieces: list[str]) -> None:
        self._generator = generator
        self._pieces = pieces
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, rest = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        length = 0
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        if len(rest) >= length:
            self._received = rest[length:]
            self._answer(msgspec.json.decode(rest[:length]) if length else {})

    def _answer(self, body: dict[str, Any]) -> None:
        tokens = body.get("max_tokens") or body.get("max_completion_tokens") or DEFAULT_TOKENS
        emit = self._stream_piece if body.get("stream") else self._whole
        if body.get("stream"):
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )
        self._generator.start(object(), Running(tokens, emit))

    def _whole(self, number: int, last: bool) -> None:
        if not last:
            return
        tokens = number + 1
        text = "".join(self._pieces[index % len(self._pieces)] for index in range(tokens))
        message = {"role": "assistant", "content": text}
        usage = {"prompt_tokens": 9, "completion_tokens": tokens, "total_tokens": 9 + tokens}
        body = msgspec.json.encode(
            {
                "id": "chatcmpl-stub",
                "object": "chat.completion",
                "created": 1700000000,
                "model": NAME,
                "choices": [{"index": 0, "message": message, "finish_reason": "length"}],
                "usage": usage,
            }
        )
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (len(body), body)
        )

    def _stream_piece(self, number: int, last: bool) -> None:
        content = self._pieces[number % len(self._pieces)]
        frame = _frame({"content": content}, None)
        if number == 0:
            frame = _frame({"role": "assistant", "content": ""}, None) + frame
        if last:
            frame += _frame({}, "length") + b"data: [DONE]\n\n"
        self._transport.write(b"%x\r\n%b\r\n%b" % (len(frame), frame, b"0\r\n\r\n" * last))


def _frame(delta: dict[str, str], finish: str | None) -> bytes:
    chunk = {
        "id": "chatcmpl-stub",
        "object": "chat.completion.chunk",
        "created": 1700000000,
        "model": NAME,
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
    }
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


async def serve(address: str, port: int) -> None:
    """Until the process is ended."""
    codec = TextCodec.load(packaged_base_model())
    ids = codec.encode(TEXT)
    pieces = [codec.token_text(token_id) for token_id in ids]
    generator = Generator()
    engine = EngineFace(address, describe(codec), ids, generator)
    engine.open()
    loop = asyncio.get_running_loop()
    await loop.create_server(lambda: HttpFace(generator, pieces), "127.0.0.1", port)
    await engine.beat()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], int(sys.argv[2])))
