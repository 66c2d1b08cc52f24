"""Server-sent events of one stream. What repeats in every chunk is serialised once."""

from typing import Any

import msgspec

from app.errors import AppError
from app.inference.answers import (
    Envelope,
    chat_logprobs,
    completion_logprobs,
    usage_object,
)
from app.inference.generation import Counts, Delta
from app.inference.tool_calls import ToolCall
from engine.text import TextCodec

DONE = b"data: [DONE]\n\n"
_json = msgspec.json.Encoder().encode


def error_frame(error: AppError) -> bytes:
    return b"data: " + _json(error.body()) + b"\n\n"


class Frames:
    """Chunks of one answer, chat's or the older completions'."""

    def __init__(self, envelope: Envelope, codec: TextCodec, *, include_usage: bool) -> None:
        self._codec = codec
        self._chat = envelope.chat
        self._offsets: dict[int, int] = {}  # choice -> characters so far, for logprobs
        head = _json(
            {
                "id": envelope.id,
                "object": "chat.completion.chunk" if envelope.chat else "text_completion",
                "created": envelope.created,
                "model": envelope.model,
                "system_fingerprint": envelope.fingerprint,
            }
        )
        self._head = b"data: " + head[:-1]
        # With usage asked for, every chunk but the last says that it is not the one.
        self._tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"

    def opening(self, choices: int) -> bytes:
        """Chat's role chunk of every choice."""
        if not self._chat:
            return b""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(
            self._chunk({"index": i, "delta": delta, "logprobs": None, "finish_reason": None})
            for i in range(choices)
        )

    def delta(self, delta: Delta) -> bytes:
        """The text, and then the end of the choice where this is it."""
        frames = b""
        if delta.text or delta.logprobs:
            frames = self._text(delta)
        for call in delta.calls:
            frames += self._call(delta.choice, call)
        if delta.finish is not None:
            end: dict[str, Any] = {"index": delta.choice}
            if self._chat:
                end["delta"] = {}
            else:
                end["text"] = ""
            frames += self._chunk(end | {"logprobs": None, "finish_reason": delta.finish})
        return frames

    def usage(self, counts: Counts) -> bytes:
        """The one chunk with usage; it has no choices."""
        return self._head + b',"choices":[],"usage":' + _json(usage_object(counts)) + b"}\n\n"

    def _text(self, delta: Delta) -> bytes:
        if delta.logprobs:
            return self._chunk(self._with_logprobs(delta))
        text = _json(delta.text)
        body = b'"delta":{"content":' + text + b"}" if self._chat else b'"text":' + text
        return (
            self._head
            + b',"choices":[{"index":%d,' % delta.choice
            + body
            + b',"logprobs":null,"finish_reason":null}]'
            + self._tail
        )

    def _call(self, choice: int, call: ToolCall) -> bytes:
        """Who is called, then with what: clients put the pieces together by the call's index."""
        begun = {
            "index": call.index,
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": ""},
        }
        rest = {"index": call.index, "function": {"arguments": call.arguments}}
        return b"".join(
            self._chunk(
                {
                    "index": choice,
                    "delta": {"tool_calls": [part]},
                    "logprobs": None,
                    "finish_reason": None,
                }
            )
            for part in (begun, rest)
        )

    def _with_logprobs(self, delta: Delta) -> dict[str, Any]:
        entries = delta.logprobs
        choice: dict[str, Any] = {"index": delta.choice, "finish_reason": None}
        if self._chat:
            choice["delta"] = {"content": delta.text}
            choice["logprobs"] = chat_logprobs(entries, self._codec)
            return choice
        start = self._offsets.get(delta.choice, 0)
        found = completion_logprobs(entries, self._codec, start) or {"tokens": []}
        self._offsets[delta.choice] = start + sum(len(token) for token in found["tokens"])
        return choice | {"text": delta.text, "logprobs": found}

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return self._head + b',"choices":[' + _json(choice) + b"]" + self._tail
