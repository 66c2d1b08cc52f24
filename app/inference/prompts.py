"""A call's prompt as token ids. Long ones never hold up the event loop, nor another tenant.

What cannot fit the context is refused by its length in bytes before it is tokenized. Long prompts
are worked on in two threads of their own, one a tenant at a time; a tenant that sends many at
once waits for itself, and is refused beyond a bound.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from app.errors import InvalidRequest, RateLimited
from app.inference.fields import refused, unsupported
from app.inference.messages import texts_of
from app.inference.refusals import refusal
from app.inference.schemas import Call
from app.inference.tools import UNSUPPORTED
from engine.errors import EngineError
from engine.text import TextCodec
from engine.types import ModelDescription

INLINE_CHARACTERS = 2_000
"""A longer prompt is rendered and tokenized in a thread (about a millisecond on the loop)."""
MOST_LONG_PROMPTS = 16
"""Long prompts of one tenant that may be under way or wait in this process."""
THREADS = 2


@dataclass
class _Lane:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    inside: int = 0


class LongPrompts:
    """Runs blocking work in few threads, one of each tenant at a time."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenize")
        self._lanes: dict[str, _Lane] = {}

    async def run(self, tenant_id: str, work: Callable[[], list[int]]) -> list[int]:
        """Raises RateLimited when too many of this tenant's are waiting."""
        lane = self._lanes.setdefault(tenant_id, _Lane())
        if lane.inside >= MOST_LONG_PROMPTS:
            raise RateLimited(
                f"{lane.inside} long prompts of this tenant are being read; send fewer at a time.",
                code="too_many_long_prompts",
            )
        lane.inside += 1
        try:
            async with lane.lock:
                running = asyncio.get_running_loop().run_in_executor(self._threads, work)
                try:
                    return await asyncio.shield(running)
                except asyncio.CancelledError:
                    await asyncio.wait([running])  # a thread cannot be stopped: keep the lane
                    raise
        finally:
            lane.inside -= 1
            if not lane.inside:
                self._lanes.pop(tenant_id, None)


_long_prompts = LongPrompts()


async def encode_prompt(
    call: Call, codec: TextCodec, description: ModelDescription, tenant_id: str
) -> list[int]:
    """The prompt's token ids. Raises InvalidRequest or RateLimited."""
    if call.token_ids is not None:
        return _checked(call.token_ids, description.vocab_size)
    if call.tools_param is not None and codec.tool_format is None:
        raise unsupported(call.tools_param, UNSUPPORTED, code="tools_unsupported")
    texts = texts_of(call.messages) if call.messages is not None else [call.text or ""]
    shown = call.tools.shown if call.tools is not None else ()
    _check_length(texts, codec, description, call.prompt_param)

    def work() -> list[int]:
        if call.messages is not None:
            return codec.encode_chat(call.messages, shown)
        return codec.encode(call.text or "", True)

    try:
        if shown or call.tools_param or sum(map(len, texts)) > INLINE_CHARACTERS:
            ids = await _long_prompts.run(tenant_id, work)
        else:
            ids = work()
    except EngineError as error:
        raise refusal(error, call.prompt_param) from error
    if not ids:
        raise refused(call.prompt_param, "has no tokens; send some text", code="empty_prompt")
    return ids


def _checked(token_ids: Sequence[int], vocab_size: int) -> list[int]:
    for index, token_id in enumerate(token_ids):
        if token_id >= vocab_size:
            raise refused(f"prompt[{index}]", f"is no token of this model: it has {vocab_size}")
    return list(token_ids)


def _check_length(
    texts: list[str], codec: TextCodec, description: ModelDescription, param: str
) -> None:
    fewest = sum(codec.fewest_tokens(text) for text in texts)
    if fewest >= description.context_length:
        raise InvalidRequest(
            f"the model's context is {description.context_length} tokens and this call needs at "
            f"least {fewest} tokens for the prompt alone; shorten the prompt",
            code="context_length_exceeded",
            param=param,
        )
