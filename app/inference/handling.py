"""From a body to an answer, for whoever was let in: a key on /v1, or a session in the console."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from fastapi import Request, Response

from app.caller import Caller
from app.errors import AppError, InvalidRequest
from app.ids import new_id
from app.inference.answers import Envelope, chat_answer, completion_answer
from app.inference.fields import clip
from app.inference.frames import Frames
from app.inference.schemas import Call, read_json
from app.inference.service import Admitted, admit
from app.inference.stream import EventStream, collect
from app.limits.service import Limits
from app.platform import Platform
from app.settings import Settings
from app.tracing import step

Parse = Callable[[dict[str, Any], Settings], Call]


async def answer(request: Request, platform: Platform, caller: Caller, parse: Parse) -> Response:
    """Runs one call; `parse` is `chat_call` or `completion_call`. Raises AppError."""
    async with with_limit_headers(platform, caller):
        _expect_json(request)
        sent = await request.body()
        received_ms = platform.clock.monotonic_ms()
        call = parse(read_json(sent), platform.settings)
        with step("admit"):
            admitted = await admit(platform, caller, call, request_id_of(request), received_ms)
        envelope = _envelope(admitted, call, int(platform.clock.now().timestamp()))
        generation = admitted.generation
        if call.stream:
            frames = Frames(envelope, generation.codec, include_usage=call.include_usage)
            return EventStream(
                generation, frames, admitted.headers, include_usage=call.include_usage
            )
        try:
            choices = await collect(generation, request.receive)
        except AppError as error:
            error.limit_headers = admitted.headers
            raise
        render = chat_answer if call.chat else completion_answer
        body = render(envelope, choices, generation.counts, generation.codec)
        return json_response(body, admitted.headers)


@asynccontextmanager
async def with_limit_headers(platform: Platform, caller: Caller) -> AsyncIterator[None]:
    """Refusals tell a known caller where its limits stand, like every other answer."""
    try:
        yield
    except AppError as error:
        if not error.limit_headers and error.code != "limits_unavailable":
            error.limit_headers = await standing(platform, caller)
        raise


async def standing(platform: Platform, caller: Caller) -> dict[str, str]:
    """The x-ratelimit headers of a call that takes nothing."""
    limits: Limits = platform.limits
    return await limits.standing(caller)


def json_response(body: object, headers: dict[str, str]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json", headers=headers)


def request_id_of(request: Request) -> str:
    """The id that the middleware gave this request."""
    found: str | None = getattr(request.state, "request_id", None)
    return found or new_id("req")


def _expect_json(request: Request) -> None:
    """A body that says nothing of itself counts as JSON."""
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if kind not in ("", "application/json"):
        raise InvalidRequest(
            f"The body came as {clip(kind)}; send JSON with `Content-Type: application/json`.",
            code="json_expected",
            param="content-type",
            status=415,
        )


def _envelope(admitted: Admitted, call: Call, created: int) -> Envelope:
    prefix = "chatcmpl" if call.chat else "cmpl"
    return Envelope(
        id=f"{prefix}-{admitted.generation.request.request_id}",
        created=created,
        model=call.model,
        fingerprint=f"fp_{admitted.description.base_digest[:12]}",
        chat=call.chat,
    )
