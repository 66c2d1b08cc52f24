"""Answers while they are made: server-sent events, or one object at the end.

Both listen for the client's going away and cancel in the engine at once. A failure before the
first token is an ordinary refusal; after it, an error frame and [DONE].
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from app.errors import AppError, InternalError
from app.inference.answers import WholeChoice
from app.inference.frames import DONE, Frames, error_frame
from app.inference.generation import Generation
from app.metrics import BROKEN_STREAMS

SEND_TIMEOUT_S = 30.0
"""A client that takes nothing for this long is treated as gone."""
LAST_FRAMES_S = 0.8


class EventStream(Response):
    """One stream. Headers go out with the first token, so that a refusal has its own status."""

    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        frames: Frames,
        headers: dict[str, str],
        *,
        include_usage: bool,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._generation = generation
        self._frames = frames
        self._include_usage = include_usage
        self._limit_headers = headers
        self._started = False
        self._ready: list[bytes] = []  # frames that go out together
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"} | headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _watched(receive, self._generation):
            ended = False
            try:
                await self._produce(send)
                ended = True
            except AppError as error:
                ended = True
                if not self._started:
                    error.limit_headers = self._limit_headers
                    raise
                BROKEN_STREAMS.labels(error.code).inc()
                await self._finish(send, error_frame(error))
            finally:
                if self._started and not ended:
                    BROKEN_STREAMS.labels("interrupted").inc()
                    async with asyncio.timeout(LAST_FRAMES_S):
                        await self._finish(send, error_frame(_interrupted()))

    async def _produce(self, send: Send) -> None:
        generation, frames = self._generation, self._frames
        async with aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                if not self._started:
                    await self._start(send)
                    self._ready.append(frames.opening(generation.request.choices))
                self._ready.append(frames.delta(delta))
                if not generation.behind:
                    await self._send(send)
        if not self._started:
            await self._start(send)
        last = frames.usage(generation.counts) if self._include_usage else b""
        await self._finish(send, last)

    async def _start(self, send: Send) -> None:
        await self._deliver(
            send,
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            },
        )
        self._started = True  # not before: a body without its start is a fault

    async def _send(self, send: Send) -> None:
        body = b"".join(self._ready)
        self._ready.clear()
        if body:
            await self._deliver(
                send, {"type": "http.response.body", "body": body, "more_body": True}
            )

    async def _finish(self, send: Send, last: bytes) -> None:
        body = b"".join((*self._ready, last, DONE))
        await self._deliver(send, {"type": "http.response.body", "body": body})

    async def _deliver(self, send: Send, message: Message) -> None:
        if self._generation.abandoned:
            return
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send(message)
        except (OSError, TimeoutError):
            self._generation.abandon()


async def collect(generation: Generation, receive: Receive) -> list[WholeChoice]:
    """The whole answer; raises AppError when the engine refuses or fails."""
    choices = [WholeChoice() for _ in range(generation.request.choices)]
    async with _watched(receive, generation), aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            choices[delta.choice].add(delta)
    return choices


@asynccontextmanager
async def _watched(receive: Receive, generation: Generation) -> AsyncIterator[None]:
    """Abandons the generation when the client goes away meanwhile."""
    watcher = asyncio.create_task(_when_gone(receive, generation.abandon))
    watcher.add_done_callback(lambda task: task.cancelled() or task.exception())
    try:
        yield
    finally:
        watcher.cancel()


async def _when_gone(
    receive: Callable[[], Awaitable[Message]], abandon: Callable[[], None]
) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    abandon()


def _interrupted() -> InternalError:
    return InternalError("the answer was interrupted by a fault of the server; retry the call")
