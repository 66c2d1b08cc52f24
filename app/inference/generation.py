"""One admitted call while it runs: tokens in, text out, and one settlement at the end.

    deltas()   reads the engine, detokenizes, holds stop strings back, yields what may go out
    abandon()  the client went away: cancels in the engine at once; what comes after is overshoot
    abort()    the platform ends the call: the same, and the client is told why

However it ends, `Account.settle` is called once, before `deltas()` returns or raises.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace

from app.clock import Clock
from app.errors import AppError
from app.inference.account import Account, Outcome
from app.inference.engines import Engine
from app.inference.refusals import refusal, reported
from app.inference.running import RunningCalls
from app.inference.tool_calls import CallText, ToolCall, call_text
from app.usage.entries import Status, microseconds
from engine.errors import EngineError, NotStarted
from engine.text import TextCodec, TextStream
from engine.types import GenerateRequest, RequestOutput, RequestUsage, TokenLogprobs

LAST_WORD_S = 2.0
"""How long the engine's own counts are waited for after it was told to stop."""


@dataclass(slots=True)
class Delta:
    """Text of one choice that may go out now, and calls after it. `finish` ends the choice:
    "stop", "length" or "tool_calls"."""

    choice: int
    text: str
    logprobs: list[TokenLogprobs] | None = None
    finish: str | None = None
    calls: list[ToolCall] = field(default_factory=list)


@dataclass(slots=True)
class _Choice:
    stream: TextStream
    calls: CallText | None = None
    tokens: int = 0  # that are billed
    finish: str | None = None


@dataclass(slots=True)
class Counts:
    """The call's usage, complete when `deltas()` has ended."""

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(eq=False)  # a call is itself, whatever it holds
class Generation:
    """`started_ms` is when the call arrived (monotonic)."""

    request: GenerateRequest
    engine: Engine
    codec: TextCodec
    stops: Sequence[str]
    account: Account
    clock: Clock
    started_ms: float
    prompt_param: str  # "messages" or "prompt": what a refusal of the prompt names
    grammar_param: str = "response_format"
    tools: Collection[str] | None = None  # names that may be called; None: text is only text
    running: RunningCalls | None = None
    elsewhere: Callable[[Collection[str]], Engine] | None = None  # another than these addresses
    counts: Counts = field(init=False)
    abandoned: bool = False
    _aborted: AppError | None = None
    _overshoot: int = 0
    _ttft_ms: float | None = None
    _usage: RequestUsage | None = None
    _cut: bool = False  # by a stop string: the engine counts more than is billed
    _cancelling: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.counts = Counts(prompt_tokens=len(self.request.prompt))
        mark = None if self.tools is None else self.codec.call_mark
        self._choices = [
            _Choice(
                TextStream(self.codec, self.stops, mark),
                None if self.tools is None else call_text(self.codec.tool_format, self.tools),
            )
            for _ in range(self.request.choices)
        ]

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Raises AppError when the engine refuses or fails; ends silently after `abandon()`."""
        if self.running is not None:
            self.running.add(self.request.tenant, self)
        outputs = self._outputs()
        told = False
        status: Status = "failed"
        error_code: str | None = "interrupted"
        try:
            async for output in outputs:
                if output.finish == "error" or output.error_code is not None:
                    self._usage = output.usage
                    raise reported(
                        output.error_code,
                        output.error_message,
                        adapter=self.request.adapter is not None,
                    )
                taken = self._take(output)
                for delta in taken:
                    if delta.finish is not None and output.finish is None:
                        await self._end_choice(output.choice)
                    yield delta
                if told and not (taken or self.behind):
                    yield Delta(output.choice, "")  # who put off sending for this one sends now
                told = told or bool(taken)
                if self._usage is None and all(choice.finish for choice in self._choices):
                    break
            if self._usage is None:
                await self._last_word(outputs)
            self._raise_if_aborted()
            status, error_code = "completed", None
        except EngineError as error:
            error_code = error.code
            if self.abandoned:
                return
            self._raise_if_aborted()
            raise refusal(error, self.prompt_param, self.grammar_param) from error
        finally:
            if self.running is not None:
                self.running.discard(self.request.tenant, self)
            if self._aborted is not None:
                status, error_code = "cancelled", self._aborted.code
            with suppress(EngineError):
                await outputs.aclose()
            await self._settle("cancelled" if self.abandoned else status, error_code)

    @property
    def behind(self) -> bool:
        """Whether the engine has said more already, so that the next delta comes at once."""
        return self.engine.client.unread(self.request.request_id) > 0

    def abandon(self) -> None:
        """The client is gone. Safe to call more than once, and after the end."""
        if not self.abandoned:
            self.abandoned = True
            self._cancel_in_engine()

    def abort(self, refusal: AppError) -> None:
        """`deltas()` raises `refusal` as soon as the engine has stopped."""
        if self._aborted is None:
            self._aborted = refusal
            self._cancel_in_engine()

    # ---------------------------------------------------------------------- inside

    def _raise_if_aborted(self) -> None:
        if self._aborted is not None:
            raise self._aborted

    async def _outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """What the engine says; a request that an engine never began goes to another one."""
        tried: set[str] = set()
        while True:
            try:
                async with aclosing(self._outputs_of(self.engine)) as outputs:
                    async for output in outputs:
                        yield output
                return
            except NotStarted as refused:
                tried.add(self.engine.address)
                await self._move(tried, refused)

    async def _outputs_of(self, engine: Engine) -> AsyncGenerator[RequestOutput, None]:
        engine.in_flight.add(self.request.request_id)
        waited_ms = max(0.0, self.clock.monotonic_ms() - self.started_ms)
        outputs = engine.client.generate(replace(self.request, waited_ms=waited_ms))
        try:
            async for output in outputs:
                yield output
        finally:
            engine.in_flight.discard(self.request.request_id)
            with suppress(EngineError):
                await _close(outputs)

    async def _move(self, tried: Collection[str], refused: NotStarted) -> None:
        """To an engine that was not tried; raises `refused` when there is none."""
        if self.elsewhere is None or self.abandoned or self._aborted is not None:
            raise refused
        try:
            engine = self.elsewhere(tried)
            await self.account.move(engine.address)
        except AppError:
            raise refused from None
        self.engine = engine

    def _take(self, output: RequestOutput) -> list[Delta]:
        if output.usage is not None:
            self._usage = output.usage
        choice = self._choices[output.choice]
        generated = len(output.token_ids) + (output.stop_token is not None)
        if self.abandoned or self._aborted is not None or choice.finish is not None:
            self._overshoot += generated
            choice.finish = choice.finish or output.finish
            return []
        if generated and self._ttft_ms is None:
            self._ttft_ms = self.clock.monotonic_ms() - self.started_ms
        piece = choice.stream.push(output.token_ids)
        text, stopped = piece.text, piece.stopped
        if stopped is not None:
            choice.tokens += piece.used
            self._overshoot += generated - piece.used
            self._cut = self._cut or output.finish is None or generated > piece.used
            choice.finish = "stop"
        else:
            choice.tokens += generated
            if output.finish is not None:
                rest = choice.stream.finish()
                text += rest.text
                choice.finish = "stop" if rest.stopped is not None else output.finish
        logprobs = output.logprobs[: piece.used] if output.logprobs else None
        calls: list[ToolCall] = []
        if choice.calls is not None:
            text, calls = self._read_calls(choice, choice.calls, text)
        if not (text or logprobs or calls or choice.finish):
            return []
        return [Delta(output.choice, text, logprobs, choice.finish, calls)]

    @staticmethod
    def _read_calls(choice: _Choice, reader: CallText, text: str) -> tuple[str, list[ToolCall]]:
        found = reader.push(text)
        if choice.finish is not None:
            rest = reader.finish()
            found.text += rest.text
            found.calls += rest.calls
            if reader.calls and choice.finish == "stop":
                choice.finish = "tool_calls"
        return found.text, found.calls

    async def _last_word(self, outputs: AsyncIterator[RequestOutput]) -> None:
        """All choices ended here, not in the engine: stops it and reads its own counts."""
        self._cancel_in_engine()
        with suppress(TimeoutError, EngineError):
            async with asyncio.timeout(LAST_WORD_S):
                async for output in outputs:
                    self._take(output)
                    if self._usage is not None:
                        return

    async def _end_choice(self, choice: int) -> None:
        """A stop string ended this choice, of which the engine knows nothing: it must not run on
        beside the others. The last one ends the whole request instead."""
        if not all(other.finish for other in self._choices):
            with suppress(EngineError):
                await self.engine.client.cancel(self.request.request_id, choice)

    def _cancel_in_engine(self) -> None:
        if self._cancelling is None:
            self._cancelling = asyncio.create_task(self._cancel())

    async def _cancel(self) -> None:
        with suppress(EngineError):
            await self.engine.client.cancel(self.request.request_id)

    async def _settle(self, status: Status, error_code: str | None) -> None:
        usage = self._usage
        completion = sum(choice.tokens for choice in self._choices)
        if usage is not None:
            self.counts.cached_tokens = usage.cached_tokens
            if status == "completed" and not self._cut:
                completion = usage.completion_tokens
            else:
                self._overshoot = max(self._overshoot, usage.completion_tokens - completion)
        self.counts.completion_tokens = completion
        nothing_done = status == "failed" and completion == 0
        outcome = Outcome(
            status=status,
            error_code=error_code,
            prompt_tokens=0 if nothing_done else self.counts.prompt_tokens,
            cached_tokens=0 if nothing_done else self.counts.cached_tokens,
            completion_tokens=completion,
            overshoot_tokens=self._overshoot,
            finish_reasons=[choice.finish for choice in self._choices if choice.finish],
            queue_ms=usage.queue_ms if usage else None,
            adapter_wait_ms=usage.adapter_wait_ms if usage else None,
            ttft_ms=self._ttft_ms,
            total_ms=self.clock.monotonic_ms() - self.started_ms,
            prefill_us=microseconds(usage.prefill_ms) if usage else 0,
            decode_us=microseconds(usage.decode_ms) if usage else 0,
            adapter_byte_s=round(usage.adapter_byte_seconds) if usage else 0,
        )
        await self.account.settle(outcome)


async def _close(outputs: AsyncIterator[RequestOutput]) -> None:
    """Closing the engine's iterator cancels whatever still runs there."""
    if isinstance(outputs, AsyncGenerator):
        await outputs.aclose()
