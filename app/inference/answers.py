"""OpenAI's objects: whole answers, usage, logprobs, the list of models."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from app.adapters.resolution import ListedModel
from app.inference.generation import Counts, Delta
from app.inference.tool_calls import ToolCall
from engine.text import TextCodec
from engine.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every object of one answer repeats."""

    id: str
    created: int  # Unix seconds
    model: str  # as the caller named it
    fingerprint: str
    chat: bool


@dataclass(slots=True)
class WholeChoice:
    """One choice of an answer that is not streamed."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.logprobs.extend(delta.logprobs or ())
        self.calls.extend(delta.calls)
        self.finish = delta.finish or self.finish


def usage_object(counts: Counts) -> dict[str, Any]:
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_tokens},
    }


def chat_answer(
    envelope: Envelope, choices: Sequence[WholeChoice], counts: Counts, codec: TextCodec
) -> dict[str, Any]:
    return {
        "id": envelope.id,
        "object": "chat.completion",
        "created": envelope.created,
        "model": envelope.model,
        "system_fingerprint": envelope.fingerprint,
        "choices": [
            {
                "index": index,
                "message": _message(choice),
                "logprobs": chat_logprobs(choice.logprobs, codec),
                "finish_reason": choice.finish,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": usage_object(counts),
    }


def _message(choice: WholeChoice) -> dict[str, Any]:
    text = "".join(choice.text)
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if choice.calls:
        message["content"] = text or None
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in choice.calls
        ]
    return message


def completion_answer(
    envelope: Envelope, choices: Sequence[WholeChoice], counts: Counts, codec: TextCodec
) -> dict[str, Any]:
    return {
        "id": envelope.id,
        "object": "text_completion",
        "created": envelope.created,
        "model": envelope.model,
        "system_fingerprint": envelope.fingerprint,
        "choices": [
            {
                "index": index,
                "text": "".join(choice.text),
                "logprobs": completion_logprobs(choice.logprobs, codec),
                "finish_reason": choice.finish,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": usage_object(counts),
    }


def chat_logprobs(
    entries: Sequence[TokenLogprobs] | None, codec: TextCodec
) -> dict[str, Any] | None:
    """Chat's form, or None where no logprobs were asked for."""
    if not entries:
        return None
    content = []
    for entry in entries:
        token = _token(entry.token_id, entry.logprob, codec)
        token["top_logprobs"] = [_token(id_, logprob, codec) for id_, logprob in entry.top]
        content.append(token)
    return {"content": content, "refusal": None}


def completion_logprobs(
    entries: Sequence[TokenLogprobs] | None, codec: TextCodec, start: int = 0
) -> dict[str, Any] | None:
    """The older form. `start` is the offset, in characters, of the first token's text."""
    if not entries:
        return None
    tokens = [codec.token_text(entry.token_id) for entry in entries]
    offsets = []
    for token in tokens:
        offsets.append(start)
        start += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [
            {codec.token_text(id_): logprob for id_, logprob in entry.top} for entry in entries
        ],
        "text_offset": offsets,
    }


def model_object(model: ListedModel) -> dict[str, Any]:
    """OpenAI's model, with what a name stands for beside it."""
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "loramux" if model.kind == "base" else "tenant",
        "loramux": {
            "kind": model.kind,
            "adapter": model.adapter_id,
            "versions": list(model.versions),
        },
    }


def _token(token_id: int, logprob: float, codec: TextCodec) -> dict[str, Any]:
    return {
        "token": codec.token_text(token_id),
        "logprob": logprob,
        "bytes": list(codec.token_bytes(token_id)),
    }
