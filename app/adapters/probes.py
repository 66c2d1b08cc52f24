"""The behaviour check: an adapter answers fixed prompts in the engine, beside the base model.

It fails on numbers that are not finite or an error of the engine's, and on nothing else. How far
the adapter moves from the base, whether it repeats itself, and what a token costs are figures.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
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


@dataclass(slots=True)
class _Comparison:
    """What the probes so far have shown."""

    divergences: list[float] = field(default_factory=list)
    adapter_loops: int = 0
    base_loops: int = 0
    adapter_ms: list[float] = field(default_factory=list)
    base_ms: list[float] = field(default_factory=list)


def _forced(answer: _Answer, start: int) -> list[TokenLogprobs]:
    """The engine's view of the tokens from position `start` of the prompt on."""
    return [entry for entry in answer.prompt_logprobs[start:] if entry is not None]


async def _compare(
    engine: Engine,
    prompt: Sequence[int],
    ref: AdapterRef,
    timeout_s: float,
    seen: _Comparison,
) -> bool:
    """Probes one prompt; False when a number that came back was not finite."""

    async def ask(
        tokens: Sequence[int], adapter: AdapterRef | None, count: int, top: int | None = None
    ) -> _Answer:
        request = _request(
            tokens,
            adapter=adapter,
            max_tokens=count,
            prompt_logprobs=top,
            timeout_s=timeout_s,
        )
        return await _ask(engine, request, timeout_s)

    base = await ask(prompt, None, ANSWER_TOKENS)
    forced = [*prompt, *base.tokens[:CONTINUATION_TOKENS]]
    base_view = await ask(forced, None, 1, TOP_TOKENS)
    adapter_view = await ask(forced, ref, 1, TOP_TOKENS)
    adapter = await ask(prompt, ref, ANSWER_TOKENS)
    if not (adapter_view.finite and adapter.finite):
        return False
    divergence = figures.mean_divergence_nats(
        _forced(base_view, len(prompt)), _forced(adapter_view, len(prompt))
    )
    if divergence is not None:
        seen.divergences.append(divergence)
    seen.adapter_loops += figures.loops(adapter.tokens)
    seen.base_loops += figures.loops(base.tokens)
    for answer, into in ((adapter, seen.adapter_ms), (base, seen.base_ms)):
        usage = answer.usage
        if usage is None:
            continue
        cost = figures.per_token_ms(usage.total_ms, usage.ttft_ms, len(answer.tokens))
        if cost is not None:
            into.append(cost)
    return True


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def judge(seen: _Comparison, thresholds: Thresholds) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Findings (warnings only) and figures of finished probes."""
    divergence = _mean(seen.divergences)
    adapter_ms, base_ms = _mean(seen.adapter_ms), _mean(seen.base_ms)
    numbers = {
        "prompts": len(PROMPTS),
        "divergence_nats": divergence,
        "adapter_loops": seen.adapter_loops,
        "base_loops": seen.base_loops,
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
    if seen.adapter_loops > seen.base_loops:
        findings.append(
            finding(
                "behaviour_loops",
                "warn",
                f"{seen.adapter_loops} of {len(PROMPTS)} answers repeat one phrase to the end, "
                f"{seen.base_loops} without the adapter; it may be overtrained",
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
    timeout_s: float,
    alive: Callable[[], Awaitable[None]],
) -> CheckOutcome:
    """Runs the probes; `alive` is awaited between prompts so that the run keeps its lease.

    Raises ProbeInterrupted when the engine could not be asked to the end.
    """
    seen = _Comparison()
    try:
        for text in PROMPTS:
            if not await _compare(engine, encode(text), ref, timeout_s, seen):
                return CheckOutcome.failed(
                    "behaviour",
                    "non_finite_logits",
                    "with this adapter the model's outputs are not finite numbers; look for "
                    "exploding weights or a scale (alpha / r) that is far too large",
                )
            await alive()
    except _AdapterFault as fault:
        return CheckOutcome.failed("behaviour", fault.code, fault.message)
    findings, numbers = judge(seen, thresholds)
    return CheckOutcome(
        group="behaviour",
        status="warn" if findings else "pass",
        findings=findings,
        figures=numbers,
    )
