"""A receiver of webhooks on a real socket, which answers as a test tells it to."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from standardwebhooks.webhooks import Webhook


@dataclass(frozen=True)
class Received:
    request_line: str
    headers: dict[str, str]
    body: bytes
    sni: str | None

    def verify(self, secret: str) -> object:
        """The message, if the specification's own verifier takes it."""
        return Webhook(secret).verify(self.body, self.headers)


@dataclass
class Receiver:
    """`answers` are given one after the other, the last one for ever."""

    port: int
    answers: list[bytes] = field(default_factory=lambda: [status(204)])
    received: list[Received] = field(default_factory=list)
    connections: int = 0
    hang: bool = False

    def url(self, path: str = "/hook", *, scheme: str = "http", host: str = "127.0.0.1") -> str:
        return f"{scheme}://{host}:{self.port}{path}"


def status(code: int, *headers: str, body: bytes = b"") -> bytes:
    lines = [f"HTTP/1.1 {code} x", f"content-length: {len(body)}", "connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@asynccontextmanager
async def receive(context: ssl.SSLContext | None = None) -> AsyncIterator[Receiver]:
    receiver = Receiver(0)
    names: list[str | None] = []
    if context is not None:
        context.sni_callback = lambda _socket, name, _context: names.append(name)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        receiver.connections += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.split(": ", 1) for line in head[1:] if line)
            lower = {name.lower(): value for name, value in headers.items()}
            body = await reader.readexactly(int(lower.get("content-length", "0")))
            receiver.received.append(Received(head[0], lower, body, names[-1] if names else None))
            if receiver.hang:
                await reader.read()
                return
            answers = receiver.answers
            writer.write(answers.pop(0) if len(answers) > 1 else answers[0])
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
    receiver.port = server.sockets[0].getsockname()[1]
    async with server:
        yield receiver
