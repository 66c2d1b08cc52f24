"""The engine's codes as answers: what the caller sent, what is broken, or what may be retried."""

import math

from app.errors import AppError, InternalError, InvalidRequest, Overloaded, RateLimited
from engine.errors import (
    AdapterCorrupt,
    AdapterRefused,
    EngineError,
    EngineUnavailable,
    RequestRefused,
)

ADAPTER_FAULT = {
    "adapter_missing": "the files of this adapter version are not in the store",
    "adapter_corrupt": "the stored files of this adapter version are damaged",
    "adapter_quarantined": "the engine has set this adapter version aside",
    "adapter_refused": "the engine cannot serve this adapter version",
    "adapter_deleted": "this adapter was deleted while the call ran",
    "non_finite_logits": "with this adapter the model's outputs are not finite numbers",
}
ADAPTER_RETRY_MS = 30_000
OF_THE_SCHEMA = frozenset({"invalid_schema", "schema_too_complex", "grammar_unavailable"})
"""The engine's own verdicts on response_format and tools; the caller can act on each."""
MAY_RETRY = frozenset({"engine_unavailable", "cancelled"})
NOT_THE_ADAPTERS = frozenset({"deadline_exceeded", "draining", "engine_step_failed", *MAY_RETRY})


def reported(code: str | None, message: str | None, *, adapter: bool) -> EngineError:
    """The error that an output carries. With an adapter, an unknown code is about its files."""
    code, message = code or "engine_error", message or ""
    if code in OF_THE_SCHEMA:
        return RequestRefused(message, code=code, field="response_format")
    if adapter and code not in NOT_THE_ADAPTERS:
        return AdapterRefused(message, code=code)
    return EngineError(message, code=code)


def refusal(
    error: EngineError, prompt_param: str = "prompt", grammar_param: str = "response_format"
) -> AppError:
    """The HTTP answer for what an engine reported, before the first token or after."""
    code = error.code
    if code == "store_unavailable":
        return Overloaded(
            "the adapter store does not answer and this adapter is not in memory; retry in a few "
            "seconds",
            code=code,
            param="model",
            retry_after_ms=5000,
        )
    if code == "adapter_exceeds_resident_bytes":
        return InvalidRequest(error.message, code=code, param="model")
    if isinstance(error, AdapterRefused | AdapterCorrupt):
        what = ADAPTER_FAULT.get(code, ADAPTER_FAULT["adapter_refused"])
        return Overloaded(
            f"{what}; upload it again if this persists",
            code=code,
            param="model",
            retry_after_ms=ADAPTER_RETRY_MS,
        )
    if code == "queue_full":
        return RateLimited(
            "the engine's queue is full; retry in a few seconds", code=code, retry_after_ms=2000
        )
    if code == "budget_unattainable":
        return Overloaded(
            error.message,
            code=code,
            param=error.field,
            retry_after_ms=math.ceil(error.retry_after_ms or 0.0),
        )
    if code == "deadline_exceeded":
        return Overloaded(
            f"{error.message or 'the call could not end in time'} Ask for fewer tokens, or retry "
            "later.",
            code=code,
            retry_after_ms=5000,
        )
    if code == "draining":
        return Overloaded(
            "the engine takes no new calls now and no other can take this one; retry in a few "
            "seconds",
            code=code,
            retry_after_ms=5000,
        )
    if isinstance(error, EngineUnavailable) or code in MAY_RETRY:
        return Overloaded(
            "the engine stopped before the answer was complete; retry in a few seconds",
            code="engine_unavailable",
            retry_after_ms=2000,
        )
    if isinstance(error, RequestRefused):
        names = {
            "prompt": prompt_param, "messages": prompt_param, "response_format": grammar_param,
        }  # fmt: skip
        field = names.get(error.field or "", error.field)
        return InvalidRequest(error.message, code=code, param=field)
    return InternalError(
        "the engine could not complete this call; retry it, and report the request id if it "
        "fails again",
        code=code,
    )
