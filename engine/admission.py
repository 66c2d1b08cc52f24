"""What a request must satisfy before anything of it is kept."""

import math
from typing import Protocol

from engine.config import EngineConfig
from engine.errors import RequestRefused
from engine.forecast import Standing, first_token_ms
from engine.request import Call
from engine.step_time import StepTimes
from engine.types import GenerateRequest, ModelDescription, SamplingParams


def check_request(
    request: GenerateRequest, description: ModelDescription, config: EngineConfig
) -> None:
    """Raises RequestRefused, naming the field, for what can never run on this engine."""
    prompt, sampling = request.prompt, request.sampling
    if not prompt:
        raise RequestRefused(
            "The prompt has no tokens; send at least one.", code="empty_prompt", field="prompt"
        )
    if len(prompt) >= description.context_length:
        raise RequestRefused(
            f"The prompt has {len(prompt)} tokens; the context length is "
            f"{description.context_length} tokens, prompt and answer together. Shorten the prompt.",
            code="context_length_exceeded",
            field="prompt",
        )
    if min(prompt) < 0 or max(prompt) >= description.vocab_size:
        raise RequestRefused(
            f"A token id of the prompt is outside 0..{description.vocab_size - 1}.",
            code="token_out_of_range",
            field="prompt",
        )
    most_choices = min(config.max_choices, config.max_running)
    if not 1 <= request.choices <= most_choices:
        raise _out_of_range("n", request.choices, f"1..{most_choices}")
    if sampling.max_tokens < 1:
        raise _out_of_range("max_tokens", sampling.max_tokens, "1 or more")
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise _out_of_range("min_tokens", sampling.min_tokens, f"0..{sampling.max_tokens}")
    if not (math.isfinite(request.weight) and request.weight > 0):
        raise _out_of_range("weight", request.weight, "positive and finite")
    if request.deadline_ms is not None and not math.isfinite(request.deadline_ms):
        raise _out_of_range("deadline_ms", request.deadline_ms, "finite")
    if not (math.isfinite(request.waited_ms) and request.waited_ms >= 0):
        raise _out_of_range("waited_ms", request.waited_ms, "0 or more")
    for name, budget_ms in (
        ("budget.ttft_ms", request.budget.ttft_ms),
        ("budget.tpot_ms", request.budget.tpot_ms),
    ):
        if budget_ms is not None and not (math.isfinite(budget_ms) and budget_ms > 0):
            raise _out_of_range(name, budget_ms, "above 0, or none")
    if not 0 < request.budget.percentile < 1:
        raise _out_of_range("budget.percentile", request.budget.percentile, "between 0 and 1")
    resident = request.resident
    if resident.most is not None and resident.most < 1:
        raise _out_of_range("resident.most", resident.most, "1 or more, or none")
    if resident.reserved < 0:
        raise _out_of_range("resident.reserved", resident.reserved, "0 or more")
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise _out_of_range("temperature", sampling.temperature, "0 or more")
    if not 0 < sampling.top_p <= 1:
        raise _out_of_range("top_p", sampling.top_p, "above 0, at most 1")
    if sampling.top_k < 0:
        raise _out_of_range("top_k", sampling.top_k, "0 or more")
    if not 0 <= sampling.min_p <= 1:
        raise _out_of_range("min_p", sampling.min_p, "0..1")
    if not (math.isfinite(sampling.repetition_penalty) and sampling.repetition_penalty > 0):
        raise _out_of_range("repetition_penalty", sampling.repetition_penalty, "above 0")
    for name in ("presence_penalty", "frequency_penalty"):
        if not math.isfinite(getattr(sampling, name)):
            raise _out_of_range(name, getattr(sampling, name), "finite")
    for token, bias in sampling.logit_bias.items():
        if not 0 <= token < description.vocab_size:
            raise _out_of_range("logit_bias", token, f"0..{description.vocab_size - 1}")
        if math.isnan(bias) or bias == math.inf:
            raise _out_of_range("logit_bias", bias, "a number or -inf")
    if request.grammar is not None:
        _check_grammar(sampling)
    for name, count in (
        ("logprobs", sampling.logprobs),
        ("prompt_logprobs", request.prompt_logprobs),
    ):
        if count is not None and not 0 <= count <= description.vocab_size:
            raise _out_of_range(name, count, f"0..{description.vocab_size}")


def _check_grammar(sampling: SamplingParams) -> None:
    """What would leave a grammar's row without any token that it may draw."""
    if sampling.min_tokens or sampling.ignore_eos:
        name = "min_tokens" if sampling.min_tokens else "ignore_eos"
        raise RequestRefused(
            f"{name} and a grammar contradict each other: the grammar says where an answer ends.",
            code="out_of_range",
            field=name,
        )
    if -math.inf in sampling.logit_bias.values():
        raise _out_of_range("logit_bias", -math.inf, "finite where there is a grammar")


NEVER_RETRY_MS = 60_000.0
"""When to ask again for a budget that this engine cannot keep even alone."""


class Queue(Protocol):
    """What the forecast needs of the scheduler."""

    def standing(self, call: Call, now_ms: float, *, everybody: bool = False) -> Standing: ...

    def smallest_step_ms(self, call: Call) -> float: ...


def refuse_late(
    call: Call, queue: Queue, times: StepTimes, margin: float, now_ms: float
) -> RequestRefused | None:
    """The refusal of a request whose budget cannot be kept, or None.

    `margin`: what predictions for this tenant are multiplied with. Without a budget nobody is
    refused, nor while the step-time model has seen too little.
    """
    budget = call.request.budget
    if not times.trusted:
        return None
    if budget.tpot_ms is not None and (alone_ms := queue.smallest_step_ms(call)) > budget.tpot_ms:
        return RequestRefused(
            f"A token takes about {alone_ms:.1f} ms here even alone; the budget is "
            f"{budget.tpot_ms:g} ms. Loosen tpot_ms.",
            code="budget_unattainable",
            field="loramux.tpot_ms",
            retry_after_ms=NEVER_RETRY_MS,
        )
    if budget.ttft_ms is None:
        return None
    left_ms = budget.ttft_ms - call.request.waited_ms
    if margin * first_token_ms(queue.standing(call, now_ms, everybody=True), times) <= left_ms:
        return None
    wait_ms = margin * first_token_ms(queue.standing(call, now_ms), times)
    if wait_ms <= left_ms:
        return None
    return RequestRefused(
        f"The first token would come in about {wait_ms:.0f} ms; the budget is "
        f"{budget.ttft_ms:g} ms"
        + (f", of which {call.request.waited_ms:.0f} are gone" if call.request.waited_ms else "")
        + ". Try again later, or loosen ttft_ms.",
        code="budget_unattainable",
        field="loramux.ttft_ms",
        retry_after_ms=wait_ms - left_ms,
    )


def _out_of_range(name: str, value: float, allowed: str) -> RequestRefused:
    return RequestRefused(
        f"{name} is {value}; it must be {allowed}.", code="out_of_range", field=name
    )
