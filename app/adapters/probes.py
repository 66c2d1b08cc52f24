"""The behaviour check: an adapter answers fixed prompts in the engine, beside the base model.

It fails on numbers that are not finite or an error of the engine's, and on nothing else. How far
the adapter moves from the base, whether it repeats itself, and what a token costs are figures.
"""

import asyncio
import secrets
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from app.adapters import figures
from app.adapters.outcome import CheckOutcome, finding
from app.ids import new_id
from engine.errors import AdapterRefused, EngineError, EngineUnavailable, RequestRefused
from engine.types import (
    AdapterRef,
    GenerateRequest,
    ModelDescription,
    RequestOutput,
    RequestUsage,
    ResidentBytes,
    SamplingParams,
    TokenLogprobs,
)

PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "Write a short greeting for a new customer.",
    "List three things to pack for a day in the mountains.",
    "What is 17 plus 25? Answer with the number and one sentence.",
)
CONTINUATION_TOKENS = 24
ANSWER_TOKENS = 48
TOP_TOKENS = 20
SYSTEM_TENANT = "system"

ENGINE_FAULTS = frozenset(
    {
        "adapter_copy_failed",
        "adapter_corrupt",
        "adapter_load_failed",
        "adapter_missing",
        "deadline_exceeded",
        "engine_error",
        "engine_step_failed",
        "exceeds_memory",
    }
)
"""With an adapter these end an attempt; every other code of a refused adapter is a verdict."""
COME_BACK_LATER = frozenset({"adapter_deleted", "draining", "queue_full"})
"""These say nothing of the adapter (an engine refuses erased content for a while)."""


class Engine(Protocol):
    """What validation and erasure need of an engine (`engine.client.EngineClient` has it)."""

    async def describe(self) -> ModelDescription: ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]: ...

    async def forget(self, ref: AdapterRef) -> bool: ...


class ProbeInterrupted(Exception):
    """The engine went away or refused the work; `adapter_ran`: the adapter was in it by then."""

    def __init__(self, message: str, *, adapter_ran: bool) -> None:
        super().__init__(message)
        self.message = message
        self.adapter_ran = adapter_ran


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Above these a figure becomes a warning. They never refuse an adapter."""

    divergence_nats: float
    cost_ratio: float


@dataclass(slots=True)
class _Answer:
    """One finished probe."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    usage: RequestUsage | None = None

    @property
    def finite(self) -> bool:
        known = [entry for entry in self.prompt_logprobs if entry is not None]
        return figures.all_finite(self.logprobs) and figures.all_finite(known)


class _AdapterFault(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def _request(
    prompt: Sequence[int],
    *,
    adapter: AdapterRef | None,
    resident: ResidentBytes,
    max_tokens: int,
    prompt_logprobs: int | None,
    timeout_s: float,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=new_id("prb"),
        tenant=SYSTEM_TENANT,
        prompt=list(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=0),
        cache_salt=secrets.token_hex(16),  # a probe never meets a cached prefix
        adapter=adapter,
        resident=resident,
        deadline_ms=timeout_s * 1000.0,
        prompt_logprobs=prompt_logprobs,
        system=True,
    )


async def _ask(engine: Engine, request: GenerateRequest, timeout_s: float) -> _Answer:
    """Runs one probe to its end."""
    answer = _Answer()
    adapter_ran = request.adapter is not None
    try:
        async with asyncio.timeout(timeout_s):
            stream = cast("AsyncGenerator[RequestOutput, None]", engine.generate(request))
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    answer.tokens.extend(output.token_ids)
                    answer.logprobs.extend(output.logprobs or [])
                    answer.prompt_logprobs.extend(output.prompt_logprobs or [])
                    answer.usage = output.usage or answer.usage
                    if output.finish == "error":
                        raise _ended(output.error_code, output.error_message, adapter_ran)
    except TimeoutError as error:
        raise ProbeInterrupted(
            f"the engine did not answer a probe within {timeout_s:g} s", adapter_ran=adapter_ran
        ) from error
    except EngineUnavailable as error:
        raise ProbeInterrupted(error.message, adapter_ran=adapter_ran) from error
    except AdapterRefused as error:
        raise _ended(error.code, error.message, adapter_ran) from error
    except RequestRefused as error:
        raise ProbeInterrupted(error.message, adapter_ran=False) from error
    except EngineError as error:
        raise ProbeInterrupted(error.message, adapter_ran=adapter_ran) from error
    return answer


def _ended(code: str | None, message: str | None, adapter_ran: bool) -> Exception:
    """What an engine's error code says: of the adapter, of the engine, or of the moment."""
    code = code or "engine_error"
    text = message or "the engine ended a probe with an error"
    if not adapter_ran or code in COME_BACK_LATER:
        return ProbeInterrupted(f"{code}: {text}", adapter_ran=False)
    if code in ENGINE_FAULTS:
        return ProbeInterrupted(f"{code}: {text}", adapter_ran=True)
    return _AdapterFault(code, text)


@dataclass(frozen=True, slots=True)
class _Probed:
    """One prompt's four answers. The views are of the base's own continuation."""

    prompt: Sequence[int]
    base: _Answer
    base_view: _Answer
    adapter_view: _Answer
    adapter: _Answer

    @property
    def finite(self) -> bool:
        return self.adapter_view.finite and self.adapter.finite

    @property
    def divergence_nats(self) -> float | None:
        views = [
            [entry for entry in view.prompt_logprobs[len(self.prompt) :] if entry is not None]
            for view in (self.base_view, self.adapter_view)
        ]
        return figures.mean_divergence_nats(*views)


async def _together(work: Iterable[Coroutine[Any, Any, _Answer]]) -> list[_Answer]:
    """Runs probes as one batch of the engine; the first that fails cancels the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _ask_all(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    ref: AdapterRef,
    resident: ResidentBytes,
    timeout_s: float,
    alive: Callable[[], Awaitable[None]],
) -> list[_Probed]:
    """Base and adapter answer in batches of the same size, so that their costs compare."""

    def ask(
        tokens: Sequence[int], adapter: AdapterRef | None, count: int, top: int | None = None
    ) -> Coroutine[Any, Any, _Answer]:
        request = _request(
            tokens,
            adapter=adapter,
            resident=resident,
            max_tokens=count,
            prompt_logprobs=top,
            timeout_s=timeout_s,
        )
        return _ask(engine, request, timeout_s)

    base = await _together(ask(prompt, None, ANSWER_TOKENS) for prompt in prompts)
    await alive()
    forced = [
        [*prompt, *answer.tokens[:CONTINUATION_TOKENS]]
        for prompt, answer in zip(prompts, base, strict=True)
    ]
    base_views = await _together(ask(tokens, None, 1, TOP_TOKENS) for tokens in forced)
    await alive()
    adapter_views = await _together(ask(tokens, ref, 1, TOP_TOKENS) for tokens in forced)
    await alive()
    adapter = await _together(ask(prompt, ref, ANSWER_TOKENS) for prompt in prompts)
    await alive()
    return [
        _Probed(*answers)
        for answers in zip(prompts, base, base_views, adapter_views, adapter, strict=True)
    ]


def _token_ms(answers: Iterable[_Answer]) -> float | None:
    """What one token after the first took, on average."""
    costs = [
        figures.per_token_ms(answer.usage.total_ms, answer.usage.ttft_ms, len(answer.tokens))
        for answer in answers
        if answer.usage is not None
    ]
    return _mean([cost for cost in costs if cost is not None])


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def _judge(
    probed: Sequence[_Probed], thresholds: Thresholds
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Findings (warnings only) and figures of finished probes."""
    divergences = [one.divergence_nats for one in probed]
    divergence = _mean([nats for nats in divergences if nats is not None])
    adapter_ms = _token_ms(one.adapter for one in probed)
    base_ms = _token_ms(one.base for one in probed)
    adapter_loops = sum(figures.loops(one.adapter.tokens) for one in probed)
    base_loops = sum(figures.loops(one.base.tokens) for one in probed)
    numbers = {
        "prompts": len(probed),
        "divergence_nats": divergence,
        "adapter_loops": adapter_loops,
        "base_loops": base_loops,
        "adapter_token_ms": adapter_ms,
        "base_token_ms": base_ms,
    }
    findings = []
    if divergence is not None and divergence > thresholds.divergence_nats:
        findings.append(
            finding(
                "behaviour_far_from_base",
                "warn",
                f"the adapter moves {divergence:.2f} nats a token away from the base model, more "
                f"than {thresholds.divergence_nats:g}; check alpha and the learning rate if that "
                "was not meant",
            )
        )
    if adapter_loops > base_loops:
        findings.append(
            finding(
                "behaviour_loops",
                "warn",
                f"{adapter_loops} of {len(probed)} answers repeat one phrase to the end, "
                f"{base_loops} without the adapter; it may be overtrained",
            )
        )
    if adapter_ms and base_ms and adapter_ms > base_ms * thresholds.cost_ratio:
        findings.append(
            finding(
                "behaviour_costly",
                "warn",
                f"a token takes {adapter_ms:.1f} ms with the adapter and {base_ms:.1f} ms without; "
                "a smaller rank or fewer target modules would be faster",
            )
        )
    return findings, numbers


async def probe(
    engine: Engine,
    encode: Callable[[str], Sequence[int]],
    ref: AdapterRef,
    thresholds: Thresholds,
    *,
    resident: ResidentBytes = ResidentBytes(),
    timeout_s: float,
    alive: Callable[[], Awaitable[None]],
) -> CheckOutcome:
    """Runs the probes; `alive` is awaited between batches so that the run keeps its lease.

    `resident`: what the tenant's adapters may hold in the engine.
    Raises ProbeInterrupted when the engine could not be asked to the end.
    """
    prompts = [encode(text) for text in PROMPTS]
    try:
        probed = await _ask_all(engine, prompts, ref, resident, timeout_s, alive)
    except _AdapterFault as fault:
        return CheckOutcome.failed("behaviour", fault.code, fault.message)
    if not all(one.finite for one in probed):
        return CheckOutcome.failed(
            "behaviour",
            "non_finite_logits",
            "with this adapter the model's outputs are not finite numbers; look for exploding "
            "weights or a scale (alpha / r) that is far too large",
        )
    findings, numbers = _judge(probed, thresholds)
    return CheckOutcome(
        group="behaviour",
        status="warn" if findings else "pass",
        findings=findings,
        figures=numbers,
    )
