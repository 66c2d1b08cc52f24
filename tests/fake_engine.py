"""An engine that says what a test tells it to, behind the interface of `EngineClient`.

Its tokens are bytes: `ByteCodec` turns text into ids 0..255 and back, 256 ends an answer.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.errors import EngineError, EngineUnavailable, NotStarted
from engine.types import (
    AdapterRef,
    EngineStatus,
    GenerateRequest,
    JournalEntry,
    ModelDescription,
    RequestOutput,
    RequestUsage,
    Residency,
    TokenLogprobs,
)

EOS = 256
TOKENIZER = "7" * 64
BASE_DIGEST = "b" * 64
BASE_NAME = "tiny-base"


class ByteCodec:
    """As much of `engine.text.TextCodec` as the api uses."""

    tokenizer_digest = TOKENIZER
    vocab_size = 257
    strips_first_space = False
    tool_format: str | None = None
    call_mark: int | None = None

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if 0 <= token_id < EOS else b""

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def is_control(self, token_id: int) -> bool:
        return token_id >= EOS

    def fewest_tokens(self, text: str) -> int:
        return len(text.strip().encode()) // 4

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Any], tools: Sequence[Any] = ()) -> list[int]:
        return list("".join(f"{m['role']}:{m['content']}\n" for m in messages).encode())


def describe(**changes: Any) -> ModelDescription:
    description = ModelDescription(
        name=BASE_NAME,
        architecture="llama",
        base_digest=BASE_DIGEST,
        tokenizer_digest=TOKENIZER,
        modules=(),
        layers=1,
        hidden_size=8,
        vocab_size=257,
        context_length=256,
        max_rank=8,
        eos_token_ids=(EOS,),
        kv_block_bytes=1024,
        adapter_dtype="fp32",
        backend="fake",
    )
    return replace(description, **changes)


@dataclass
class FakeEngine:
    """`text` is every answer; with an adapter, its digest's first four characters come first.

    refuse      raised before the first output
    fail_at     (token, error): raised, or with a code sent as an error output, at that token
    gate        each token needs one permit (`let(3)`)
    ending      it had its SIGTERM: refuses new requests, as when `held` by an operator
    overshoot   tokens that still come between a cancel and the end that it brings
    """

    description: ModelDescription = field(default_factory=describe)
    text: str = "Hello, world"
    texts: tuple[str, ...] = ()  # by choice, where they differ
    refuse: EngineError | None = None
    fail_at: tuple[int, EngineError | str] | None = None
    gate: asyncio.Semaphore | None = None
    overshoot: int = 0
    cached_tokens: int = 0
    running: int = 0
    alive: bool = True
    held: bool = False
    ending: bool = False
    engine_id: str = "engine-1"
    requests: list[GenerateRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    cancelled_choices: list[tuple[str, int]] = field(default_factory=list)
    cancel_attempts: int = 0
    entries: dict[str, JournalEntry] = field(default_factory=dict)
    acknowledged: list[str] = field(default_factory=list)
    adapters: list[Residency] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)  # other fields of its status
    completion_tokens: dict[str, int] = field(default_factory=dict)
    _cancels: dict[str, asyncio.Event] = field(default_factory=dict)
    _after_cancel: int = 0

    @property
    def draining(self) -> bool:
        return self.alive and (self.held or self.ending)

    def hold(self) -> None:
        """From now on every token waits for `let`."""
        self.gate = asyncio.Semaphore(0)

    def let(self, tokens: int) -> None:
        assert self.gate is not None
        for _ in range(tokens):
            self.gate.release()

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def describe(self) -> ModelDescription:
        self._reachable()
        return self.description

    def unread(self, request_id: str) -> int:
        """Says one thing at a time."""
        return 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        if not self.alive:
            raise NotStarted("the engine's process has ended")
        if self.held or self.ending:
            raise NotStarted("the engine takes no new requests now", code="draining")
        self.requests.append(request)
        if self.refuse is not None:
            raise self.refuse
        cancel = self._cancels[request.request_id] = asyncio.Event()
        self.running += 1
        ended = False
        try:
            async for output in self._run(request, cancel):
                ended = output.usage is not None
                yield output
        finally:
            self.running -= 1
            del self._cancels[request.request_id]
            if not ended and not cancel.is_set():
                self.cancelled.append(request.request_id)  # the iterator was closed early

    async def _run(
        self, request: GenerateRequest, cancel: asyncio.Event
    ) -> AsyncIterator[RequestOutput]:
        answers = [self._answer(request, choice) for choice in range(request.choices)]
        made, sequence = 0, 0
        unfinished = set(range(request.choices))
        for position in range(request.sampling.max_tokens + 1):
            if not unfinished:
                return
            await self._step(cancel)
            if self.fail_at is not None and position == self.fail_at[0]:
                yield self._fail(request, sequence, made)
                return
            for choice in sorted(unfinished):
                ended_by = None
                alone = (request.request_id, choice) in self.cancelled_choices
                if alone or (cancel.is_set() and position >= self._after_cancel):
                    ended_by = "cancelled"
                elif position == len(answers[choice]):
                    ended_by = "stop"
                elif position == request.sampling.max_tokens - 1:
                    ended_by = "length"
                tokens = [] if ended_by in ("cancelled", "stop") else [answers[choice][position]]
                made += len(tokens) + (ended_by == "stop")
                self.completion_tokens[request.request_id] = made
                if ended_by:
                    unfinished.discard(choice)
                yield RequestOutput(
                    request.request_id,
                    sequence,
                    choice,
                    token_ids=tokens,
                    logprobs=self._logprobs(request, tokens),
                    finish=ended_by,
                    stop_token=EOS if ended_by == "stop" else None,
                    usage=None if unfinished else self._usage(request, made),
                )
                sequence += 1

    async def _step(self, cancel: asyncio.Event) -> None:
        if self.gate is None:
            await asyncio.sleep(0)
            return
        if cancel.is_set():
            return
        permit = asyncio.ensure_future(self.gate.acquire())
        stop = asyncio.ensure_future(cancel.wait())
        try:
            await asyncio.wait({permit, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            permit.cancel()
            stop.cancel()

    def _answer(self, request: GenerateRequest, choice: int) -> list[int]:
        prefix = f"{request.adapter.digest[:4]}: " if request.adapter is not None else ""
        text = self.texts[choice] if self.texts else self.text
        return list((prefix + text).encode())

    def _logprobs(self, request: GenerateRequest, tokens: list[int]) -> list[TokenLogprobs] | None:
        count = request.sampling.logprobs
        if count is None:
            return None
        top = [(ord("a") + i, -1.0 - i) for i in range(count)]
        return [TokenLogprobs(token, -0.5, top) for token in tokens]

    def _usage(self, request: GenerateRequest, made: int) -> RequestUsage:
        return RequestUsage(len(request.prompt), self.cached_tokens, made, 1.0, 0.0, 2.0, 3.0)

    def _fail(self, request: GenerateRequest, sequence: int, made: int) -> RequestOutput:
        assert self.fail_at is not None
        error = self.fail_at[1]
        if isinstance(error, EngineError):
            raise error
        return RequestOutput(
            request.request_id,
            sequence,
            finish="error",
            usage=self._usage(request, made),
            error_code=error,
            error_message="the engine says so",
        )

    async def cancel(self, request_id: str, choice: int | None = None) -> None:
        self.cancel_attempts += 1
        self._reachable()
        if choice is not None:
            self.cancelled_choices.append((request_id, choice))
            return
        self.cancelled.append(request_id)
        if request_id in self._cancels:
            made = self.completion_tokens.get(request_id, 0)
            self._after_cancel = made + self.overshoot
            self._cancels[request_id].set()

    async def status(self) -> EngineStatus:
        self._reachable()
        status = EngineStatus(
            engine_id=self.engine_id,
            base_digest=self.description.base_digest,
            uptime_ms=1.0,
            running=self.running,
            waiting=0,
            waiting_by_tenant={},
            steps=0,
            step_ms_p50=1.0,
            kv_blocks_used=0,
            kv_blocks_cached=0,
            extents_total=1,
            extent_bytes=1024,
            device_adapter_bytes=0,
            host_adapter_bytes=0,
            host_budget_bytes=0,
            adapters=self.adapters,
            prompt_tokens_total=0,
            completion_tokens_total=0,
            preemptions_total=0,
            draining=self.held or self.ending,
            held=self.held,
        )
        return replace(status, **self.figures)

    async def drain(self) -> None:
        self._reachable()
        self.held = True

    async def resume(self) -> None:
        self._reachable()
        self.held = False

    async def forget(self, ref: AdapterRef) -> bool:
        return True

    async def journal(self, request_ids: Iterable[str]) -> list[JournalEntry]:
        self._reachable()
        return [self.entries[id_] for id_ in request_ids if id_ in self.entries]

    async def acknowledge(self, request_ids: Iterable[str]) -> None:
        self._reachable()
        self.acknowledged.extend(request_ids)

    def _reachable(self) -> None:
        if not self.alive:
            raise EngineUnavailable("the engine's process has ended")
