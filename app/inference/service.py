"""Admission of a call: resolve, tokenize, check against model and tenant, reserve, open the row.

Nothing reaches the engine before the ledger has the row, and no database session outlives this.
"""

import secrets
from collections.abc import Collection
from dataclasses import dataclass

from app.adapters.resolution import ResolvedModel
from app.caller import Caller, TenantLimits
from app.errors import AppError, InvalidRequest
from app.inference.account import Account
from app.inference.call_grammar import call_grammar
from app.inference.engines import Engine, EngineRouter
from app.inference.fields import refused
from app.inference.generation import Generation
from app.inference.prompts import encode_prompt
from app.inference.schemas import Call
from app.limits.service import Limits, limit_headers, token_ceiling
from app.platform import Platform
from app.settings import Settings
from app.tracing import traceparent
from app.usage.entries import OpenEntry
from app.usage.service import Ledger
from engine.types import (
    GenerateRequest,
    LatencyBudget,
    ModelDescription,
    ResidentBytes,
    SamplingParams,
)

SMALLEST_NUCLEUS = 1e-9
"""top_p=0, which keeps the most likely token alone; the engine wants a share above 0."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """A call that may run, and the headers of its answer."""

    generation: Generation
    model: ResolvedModel
    description: ModelDescription
    headers: dict[str, str]


async def admit(
    platform: Platform,
    caller: Caller,
    call: Call,
    request_id: str,
    received_ms: float | None = None,
) -> Admitted:
    """Raises AppError; then nothing is held and nothing was billed.

    `received_ms`: when the body was there in full (monotonic; default: now), which is where the
    time to the first token begins.
    """
    started_ms = platform.clock.monotonic_ms() if received_ms is None else received_ms
    router: EngineRouter = platform.engines
    limits: Limits = platform.limits
    ledger: Ledger = platform.ledger
    model = await platform.names.for_call(caller, call.model, request_id=request_id)
    description = router.description(model.base_digest)
    codec = router.codec_of(description)
    prompt = await encode_prompt(call, codec, description, caller.tenant_id)
    grammar = call.grammar
    if call.tools is not None and codec.tool_format is not None:
        grammar = call_grammar(call.tools, codec.tool_format, codec.call_mark)
    max_tokens = token_allowance(call, len(prompt), description, caller, platform.settings)
    request = GenerateRequest(
        request_id=request_id,
        tenant=caller.tenant_id,
        prompt=prompt,
        sampling=sampling_params(call, max_tokens, description),
        cache_salt=caller.tenant_salt,
        adapter=model.ref,
        choices=call.choices,
        weight=caller.limits.weight,
        budget=latency_budget(call.budget, caller),
        resident=resident_bytes(caller.limits),
        grammar=grammar,
        deadline_ms=platform.settings.engine_timeout_s * 1000.0,
        traceparent=traceparent(),
    )

    def elsewhere(besides: Collection[str] = ()) -> Engine:
        base = description.base_digest
        return router.choose(model.ref, base, key=request_id, besides=besides)

    engine = elsewhere()
    reserved = len(prompt) + call.choices * max_tokens
    held, decision = await limits.reserve(caller, request_id, reserved)
    opened = False
    try:
        month = await ledger.open(
            OpenEntry(
                request_id=request_id,
                tenant_id=caller.tenant_id,
                key_id=caller.key_id,
                user_id=caller.user_id,
                adapter_id=model.adapter_id,
                version_id=model.version_id,
                alias=model.alias,
                model=_ledger_name(model),
                endpoint=call.endpoint,
                streamed=call.stream,
                engine=engine.address,
                reserved_tokens=reserved,
                monthly=_monthly(caller),
            )
        )
        opened = True
        if model.adapter_id is not None:
            platform.adapter_uses.mark(model.adapter_id, model.version_id)
    except AppError as error:
        error.limit_headers = limit_headers(decision)
        raise
    finally:
        if not opened:
            await limits.settle(held, tokens=0, refund_request=True)
    generation = Generation(
        request=request,
        engine=engine,
        codec=codec,
        stops=call.sampling.stop,
        account=Account(request_id, engine.address, ledger, limits, held, platform.clock),
        clock=platform.clock,
        started_ms=started_ms,
        prompt_param=call.prompt_param,
        grammar_param=call.grammar_param,
        tools=call.tools.names if call.tools is not None else None,
        running=platform.running,
        elsewhere=elsewhere,
    )
    headers = limit_headers(decision) | (month.headers() if month is not None else {})
    headers |= {"x-loramux-adapter": adapter_header(model)}
    return Admitted(generation, model, description, headers)


def token_allowance(
    call: Call, prompt: int, description: ModelDescription, caller: Caller, settings: Settings
) -> int:
    """Tokens that each choice may have: what was asked, or a default that fits every limit."""
    room = description.context_length - prompt
    asked, param = call.sampling.max_tokens, call.sampling.max_tokens_param
    if room < 1 or (asked or 0) > room:
        needs = f"{prompt} tokens" if room < 1 else f"{prompt} + {asked} tokens ({param})"
        raise InvalidRequest(
            f"the model's context is {description.context_length} tokens and this call needs "
            f"{needs if room >= 1 else needs + ' for the prompt alone'}; shorten the prompt"
            + (f" or lower {param}" if asked else ""),
            code="context_length_exceeded",
            param=call.prompt_param if room < 1 else param,
        )
    ceiling = caller.limits.max_tokens
    if asked is not None:
        if ceiling is not None and asked > ceiling:
            raise refused(
                param,
                f"is {asked} and this tenant's limit is {ceiling}; send at most {ceiling}",
                code="max_tokens_exceeds_limit",
            )
        return asked
    bounds = [settings.default_max_tokens, room]
    if ceiling is not None:
        bounds.append(ceiling)
    per_minute = token_ceiling(caller)
    if per_minute is not None:
        bounds.append(max(1, (per_minute - prompt) // call.choices))
    return min(bounds)


def sampling_params(call: Call, max_tokens: int, description: ModelDescription) -> SamplingParams:
    """The engine's parameters; a call without a seed gets a random one."""
    wanted = call.sampling
    for token_id in wanted.logit_bias:
        if token_id >= description.vocab_size:
            raise refused(
                f"logit_bias['{token_id}']",
                f"is no token of this model: it has {description.vocab_size}",
            )
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=wanted.temperature,
        top_p=max(wanted.top_p, SMALLEST_NUCLEUS),
        top_k=min(wanted.top_k, description.vocab_size),
        min_p=wanted.min_p,
        repetition_penalty=wanted.repetition_penalty,
        presence_penalty=wanted.presence_penalty,
        frequency_penalty=wanted.frequency_penalty,
        logit_bias=wanted.logit_bias,
        logprobs=wanted.logprobs,
        seed=secrets.randbits(63) if wanted.seed is None else wanted.seed,
    )


def latency_budget(asked: LatencyBudget | None, caller: Caller) -> LatencyBudget:
    """The key's or the tenant's budget, loosened where the call asks for it, never tightened."""
    asked = asked or LatencyBudget()
    return LatencyBudget(
        ttft_ms=_loosened("ttft_ms", asked.ttft_ms, caller.ttft_ms),
        tpot_ms=_loosened("tpot_ms", asked.tpot_ms, caller.tpot_ms),
        percentile=caller.budget_percentile,
    )


def resident_bytes(limits: TenantLimits) -> ResidentBytes:
    """What the tenant's adapters may hold in the engine, and what others cannot take."""
    most, reserved = limits.max_resident_bytes, limits.reserved_resident_bytes
    return ResidentBytes(most, reserved if most is None else min(reserved, most))


def _loosened(name: str, wanted: float | None, own: float | None) -> float | None:
    if wanted is None:
        return own
    if own is None:
        raise refused(
            f"loramux.{name}",
            "may only loosen the tenant's budget, and it has none; remove it",
            code="budget_tightened",
        )
    if wanted < own:
        raise refused(
            f"loramux.{name}",
            f"may only loosen the budget in force of {own:g} ms; send at least that",
            code="budget_tightened",
        )
    return wanted


def adapter_header(model: ResolvedModel) -> str:
    """What answered: "adp_…@v3; <digest>", or "base; <digest>"."""
    if model.adapter_id is None:
        return f"base; {model.base_digest}"
    return f"{model.adapter_id}@v{model.version_number}; {model.digest}"


def _ledger_name(model: ResolvedModel) -> str:
    if model.adapter_id is None:
        return model.name
    return f"{model.adapter_name}@v{model.version_number}"


def _monthly(caller: Caller) -> dict[str, int | None]:
    owners = {caller.tenant_id: caller.limits.monthly_tokens}
    if caller.key_id is not None:
        owners[caller.key_id] = caller.key_limits.monthly_tokens
    return owners
