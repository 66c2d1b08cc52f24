"""Load over raw sockets, cheap enough not to be what is measured: one request a caller."""

import asyncio
import re
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_END_OF_CHUNKS = b"0\r\n\r\n"
TIMEOUT_S = 45.0


class BadAnswer(Exception):
    """A proxy refused, or answered something else than the stub said."""


class Connection(asyncio.Protocol):
    """Keeps its connection; an answer ends by its length or with the last chunk."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self._wanted = 0  # bytes of the whole answer, -1: chunks, 0: the head is not there yet
        self._answer: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error or BadAnswer("the connection was closed"))

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        if not self._wanted:
            self._read_head()
        if self._wanted > 0:
            whole = self._size >= self._wanted
        else:
            tail = data if len(data) >= 5 else b"".join(self._parts[-5:])
            whole = self._wanted < 0 and tail.endswith(_END_OF_CHUNKS)
        if whole and self._answer is not None:
            self._answer.set_result(b"".join(self._parts))
            self._answer = None

    def _read_head(self) -> None:
        head, found, _ = b"".join(self._parts).partition(b"\r\n\r\n")
        if found:
            length = _LENGTH.search(head)
            self._wanted = -1 if length is None else len(head) + 4 + int(length[1])

    async def ask(self, request: bytes) -> bytes:
        """The answer, head and all. Raises BadAnswer unless its status is 200."""
        self._parts.clear()
        self._size = self._wanted = 0
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        answer = await self._answer
        if not answer.startswith(b"HTTP/1.1 200"):
            raise BadAnswer((answer[:60] + answer[-400:]).decode(errors="replace"))
        return answer

    def close(self) -> None:
        self._transport.close()


@dataclass(frozen=True)
class Target:
    """A proxy (or the stub itself) as its callers reach it."""

    name: str
    port: int
    model: str
    key: str = ""

    async def connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, "127.0.0.1", self.port)
        return connection

    def request(self, prompt: str, tokens: int, *, stream: bool) -> bytes:
        message = {"role": "user", "content": prompt}
        body = msgspec.json.encode(
            {"model": self.model, "messages": [message], "max_tokens": tokens, "stream": stream}
        )
        return (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
            b"authorization: Bearer %b\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (self.key.encode(), len(body), body)
        )


@dataclass
class Sample:
    """What one phase saw."""

    seconds: float = 0.0
    own_cpu_s: float = 0.0
    took_ms: list[float] = field(default_factory=list)


async def load(
    target: Target, request: bytes, *, callers: int, seconds: float, requests: int = 10**9
) -> Sample:
    """Until the time or the number is spent; a request that was begun ends."""
    sample = Sample()
    connections = [await target.connect() for _ in range(callers)]
    left = requests
    began, cpu = time.perf_counter(), time.process_time()

    async def call(connection: Connection) -> None:
        nonlocal left
        while left > 0 and (sent := time.perf_counter()) - began < seconds:
            left -= 1
            await connection.ask(request)
            sample.took_ms.append((time.perf_counter() - sent) * 1000)

    try:
        async with asyncio.timeout(seconds + TIMEOUT_S):
            await asyncio.gather(*map(call, connections))
    except TimeoutError:
        raise BadAnswer(f"{target.name} left calls unanswered for {TIMEOUT_S:g} s") from None
    finally:
        for connection in connections:
            connection.close()
    sample.seconds = time.perf_counter() - began
    sample.own_cpu_s = time.process_time() - cpu
    return sample


def whole_text(answer: bytes) -> str:
    """The text of an answer that was not streamed."""
    body = msgspec.json.decode(answer.partition(b"\r\n\r\n")[2])
    text: str = body["choices"][0]["message"]["content"]
    return text


def streamed_text(answer: bytes) -> tuple[str, int]:
    """The text of a stream, and how many of its frames had some."""
    rest = answer.partition(b"\r\n\r\n")[2]
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    texts = []
    for frame in body.split(b"\n\n"):
        data = frame.removeprefix(b"data: ")
        if data and data != b"[DONE]":
            for choice in msgspec.json.decode(data)["choices"]:
                texts.append(choice["delta"].get("content") or "")
    return "".join(texts), sum(map(bool, texts))
