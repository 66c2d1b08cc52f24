"""One target's requests as figures. Pure: rows in, numbers out.

Percentiles are nearest-rank: a value that was measured, never one in between.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from app.adapters.comparison_schemas import (
    ErrorCount,
    LatencyFigures,
    LengthFigures,
    TargetFigures,
)
from app.usage.target_repository import AnsweredRequest


def target_figures(
    *,
    version: int,
    weight: int,
    state: str,
    by_status: Mapping[str, int],
    errors: Mapping[str, int],
    answered: Sequence[AnsweredRequest],
) -> TargetFigures:
    """`by_status` and `errors` count all of the window, `answered` samples its newest."""
    ended = sum(by_status.get(status, 0) for status in ("completed", "cancelled", "failed"))
    failed = by_status.get("failed", 0)
    reasons = Counter(reason for request in answered for reason in request.finish_reasons)
    return TargetFigures(
        version=version,
        weight=weight,
        state=state,
        requests=ended + by_status.get("open", 0),
        running=by_status.get("open", 0),
        completed=by_status.get("completed", 0),
        cancelled=by_status.get("cancelled", 0),
        failed=failed,
        error_rate=failed / ended if ended else None,
        errors=[
            ErrorCount(code=code, requests=count)
            for code, count in sorted(errors.items(), key=lambda entry: (-entry[1], entry[0]))
        ],
        sampled=len(answered),
        finish_reasons=dict(sorted(reasons.items())),
        output_tokens=lengths([request.completion_tokens for request in answered]),
        ttft_ms=latencies(request.ttft_ms for request in answered),
        token_ms=latencies(ms_per_token(request) for request in answered),
    )


def ms_per_token(request: AnsweredRequest) -> float | None:
    """Milliseconds from one token of a choice to the next, after the first.

    Choices of one request run side by side, so the tokens are divided among them.
    """
    if request.ttft_ms is None or request.total_ms is None:
        return None
    after_first = request.completion_tokens / max(1, len(request.finish_reasons)) - 1
    return (request.total_ms - request.ttft_ms) / after_first if after_first > 0 else None


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Of values in rising order: the smallest that `percent` % of them do not exceed."""
    rank = max(1, -(-len(ordered) * percent // 100))
    return ordered[rank - 1]


def lengths(tokens: Iterable[int]) -> LengthFigures | None:
    ordered = sorted(tokens)
    if not ordered:
        return None
    return LengthFigures(
        mean=round(sum(ordered) / len(ordered), 2),
        p50=int(percentile(ordered, 50)),
        p95=int(percentile(ordered, 95)),
    )


def latencies(values: Iterable[float | None]) -> LatencyFigures | None:
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    p50, p95, p99 = (round(percentile(ordered, percent), 3) for percent in (50, 95, 99))
    return LatencyFigures(p50=p50, p95=p95, p99=p99)
