"""Messages between the engine and its clients: two frames, a kind and a msgpack body.

    client -> engine   hello ping bye generate cancel call
    engine -> client   welcome beat stranger outputs refused reply failed

A body is decoded straight into its dataclass; what does not fit is a WireError, never a crash.
There are no extension types, and the sockets cap the size of a frame.
"""

import math
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal

import msgspec

from engine.errors import (
    AdapterCorrupt,
    AdapterMissing,
    AdapterRefused,
    EngineError,
    EngineUnavailable,
    NotStarted,
    RequestRefused,
)
from engine.tracing import TRACEPARENT
from engine.types import (
    AdapterRef,
    EngineStatus,
    GenerateRequest,
    JournalEntry,
    ModelDescription,
    RequestOutput,
)

MAX_MESSAGE_BYTES = 32 << 20
"""Largest frame that either side accepts (zmq drops the peer that sends a larger one)."""
MAX_ID_CHARACTERS = 128
MAX_IDS = 100_000
_INT31 = 2**31 - 1


class WireError(Exception):
    """A message that this protocol version does not know or that is malformed."""


# --------------------------------------------------------------------------- client -> engine


@dataclass(frozen=True, slots=True)
class Hello:
    """Opens a session. A second hello of the same `client_id` ends the first one's requests."""

    protocol: int
    client_id: str  # random, new for every connection


@dataclass(frozen=True, slots=True)
class Ping:
    """Says that the client is there; sent at every beat interval."""


@dataclass(frozen=True, slots=True)
class Bye:
    """Ends the session and cancels what is left of it."""


@dataclass(frozen=True, slots=True)
class Generate:
    request: GenerateRequest


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends a request, or one choice of it."""

    request_id: str
    choice: int | None = None


CallName = Literal["describe", "status", "forget", "journal", "acknowledge", "drain", "resume"]


@dataclass(frozen=True, slots=True)
class Call:
    """A question that gets one `reply` or `failed` under the same number."""

    number: int
    name: CallName
    adapter: AdapterRef | None = None  # forget
    request_ids: list[str] | None = None  # journal, acknowledge


# --------------------------------------------------------------------------- engine -> client


@dataclass(frozen=True, slots=True)
class Welcome:
    protocol: int
    engine_id: str  # new at every start
    beat_ms: float


@dataclass(frozen=True, slots=True)
class Beat:
    """Sent by the I/O thread, whatever the step loop does: `turns` stands still when that hangs."""

    engine_id: str
    ready: bool
    turns: int  # of the step loop
    pending: bool  # whether the step loop has something to do, so that `turns` ought to move
    draining: bool


@dataclass(frozen=True, slots=True)
class Stranger:
    """The engine has no session with this peer (any more); it must say hello again."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """All that one step brought for one client."""

    outputs: list[RequestOutput]


@dataclass(frozen=True, slots=True)
class Problem:
    """An EngineError in transit."""

    error: str  # class name
    code: str
    message: str
    field: str | None = None
    retry_after_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    request_id: str
    problem: Problem


@dataclass(frozen=True, slots=True)
class Reply:
    """One of these is set, by the call's name."""

    number: int
    description: ModelDescription | None = None
    status: EngineStatus | None = None
    forgotten: bool | None = None
    entries: list[JournalEntry] | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    number: int
    problem: Problem


ClientMessage = Hello | Ping | Bye | Generate | Cancel | Call
EngineMessage = Welcome | Beat | Stranger | Outputs | Refused | Reply | Failed

_CLIENT_KINDS: tuple[type[Any], ...] = (Hello, Ping, Bye, Generate, Cancel, Call)
_ENGINE_KINDS: tuple[type[Any], ...] = (Welcome, Beat, Stranger, Outputs, Refused, Reply, Failed)
_ENCODER = msgspec.msgpack.Encoder()


def _decoders(kinds: tuple[type[Any], ...]) -> dict[bytes, msgspec.msgpack.Decoder[Any]]:
    return {kind.__name__.lower().encode(): msgspec.msgpack.Decoder(kind) for kind in kinds}


_FROM_CLIENT = _decoders(_CLIENT_KINDS)
_FROM_ENGINE = _decoders(_ENGINE_KINDS)


def encode(message: ClientMessage | EngineMessage) -> list[bytes]:
    """Two frames: kind and body."""
    return [type(message).__name__.lower().encode(), _ENCODER.encode(message)]


def check(message: ClientMessage) -> None:
    """Refuses what types cannot say: ids, token ids and numbers out of bounds. Raises WireError."""
    if isinstance(message, Hello):
        _check_ids([message.client_id])
    elif isinstance(message, Cancel):
        _check_ids([message.request_id])
    elif isinstance(message, Call):
        _check_ids(message.request_ids or [])
    elif isinstance(message, Generate):
        request = message.request
        _check_ids([request.request_id, request.tenant])
        if request.prompt and not 0 <= min(request.prompt) <= max(request.prompt) <= _INT31:
            raise WireError("a prompt has a token id out of range")
        if request.traceparent is not None and not TRACEPARENT.fullmatch(request.traceparent):
            raise WireError("the trace context is malformed")
        _check_numbers(request)


def decode_from_client(frames: list[bytes]) -> ClientMessage:
    """What the engine received, checked. Raises WireError."""
    message: ClientMessage = _decode(frames, _FROM_CLIENT)
    check(message)
    return message


def decode_from_engine(frames: list[bytes]) -> EngineMessage:
    """What the client received. Raises WireError."""
    message: EngineMessage = _decode(frames, _FROM_ENGINE)
    return message


def _decode(frames: list[bytes], decoders: dict[bytes, msgspec.msgpack.Decoder[Any]]) -> Any:
    if len(frames) != 2:
        raise WireError(f"a message has two frames, not {len(frames)}")
    decoder = decoders.get(frames[0])
    if decoder is None:
        raise WireError(f"unknown kind {frames[0][:32]!r}")
    try:
        return decoder.decode(frames[1])
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"malformed {frames[0].decode()}: {str(error)[:200]}") from None


def _check_ids(ids: list[str]) -> None:
    if len(ids) > MAX_IDS:
        raise WireError(f"{len(ids)} ids in one message; {MAX_IDS} are allowed")
    if any(not 0 < len(identifier) <= MAX_ID_CHARACTERS for identifier in ids):
        raise WireError(f"an id is empty or longer than {MAX_ID_CHARACTERS} characters")


@cache
def _checked_fields(kind: Any) -> tuple[str, ...]:
    return tuple(item.name for item in fields(kind) if item.name != "prompt")


def _check_numbers(value: object) -> None:
    """Every float of the message must be a finite number."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise WireError("a number is not finite")
    elif is_dataclass(value):
        kind: Any = type(value)
        for name in _checked_fields(kind):
            _check_numbers(getattr(value, name))
    elif isinstance(value, dict):
        for number in value.values():
            _check_numbers(number)


# --------------------------------------------------------------------------- errors in transit

_ERRORS: dict[str, type[EngineError]] = {
    error.__name__: error
    for error in (
        RequestRefused,
        AdapterRefused,
        AdapterMissing,
        AdapterCorrupt,
        EngineUnavailable,
        NotStarted,
    )
}


def to_problem(error: EngineError) -> Problem:
    """An error as data; subclasses unknown to the other side travel as their nearest base."""
    name = next((t.__name__ for t in type(error).__mro__ if t.__name__ in _ERRORS), "EngineError")
    return Problem(name, error.code, error.message, error.field, error.retry_after_ms)


def to_error(problem: Problem) -> EngineError:
    """The error again, of the class it had in the engine."""
    error_class = _ERRORS.get(problem.error, EngineError)
    return error_class(
        problem.message,
        code=problem.code,
        field=problem.field,
        retry_after_ms=problem.retry_after_ms,
    )
