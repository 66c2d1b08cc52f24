"""How a tenant's requests went over a span: latencies, outcomes and tokens, for the overview."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from math import ceil

from sqlalchemy.ext.asyncio import AsyncSession

from app.usage import repository
from app.usage.repository import Outcome

NEWEST = 5000
"""Percentiles are those of the newest so many requests of the span."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Milliseconds; None when nothing was measured."""

    p50: float | None
    p95: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Percentiles":
        ordered = sorted(values)
        return cls(*(_at(ordered, share) for share in (0.50, 0.95, 0.99)))


@dataclass(frozen=True, slots=True)
class Standing:
    """Requests of one span. Shares are 0 to 1; None when there is nothing to tell."""

    seen: int
    complete: bool  # False: older requests of the span are left out of the percentiles
    completed: int
    cancelled: int  # by the client
    interrupted: int  # cancelled by the platform; why is among the reasons
    failed: int
    reasons: tuple[tuple[str, int], ...]  # error codes, the most frequent first
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    in_budget: float | None


async def standing(
    session: AsyncSession,
    tenant_id: str,
    *,
    start: datetime,
    ttft_budget_ms: float | None,
    tpot_budget_ms: float | None,
) -> Standing:
    """The newest closed requests since `start`. In budget: of those that gave a token."""
    rows = await repository.outcomes(session, tenant_id, start, NEWEST + 1)
    complete, rows = len(rows) <= NEWEST, rows[:NEWEST]
    states = Counter(row.status for row in rows)
    interrupted = sum(row.status == "cancelled" and row.error_code is not None for row in rows)
    reasons = Counter(row.error_code for row in rows if row.error_code)
    answered = [row for row in rows if row.ttft_ms is not None and row.completion_tokens > 0]
    within = None
    if answered and (ttft_budget_ms is not None or tpot_budget_ms is not None):
        kept = sum(_in_budget(row, ttft_budget_ms, tpot_budget_ms) for row in answered)
        within = kept / len(answered)
    return Standing(
        seen=len(rows),
        complete=complete,
        completed=states["completed"],
        cancelled=states["cancelled"] - interrupted,
        interrupted=interrupted,
        failed=states["failed"],
        reasons=tuple(reasons.most_common(8)),
        ttft_ms=Percentiles.of([row.ttft_ms for row in answered if row.ttft_ms is not None]),
        tpot_ms=Percentiles.of([tpot for row in answered if (tpot := tpot_ms(row)) is not None]),
        in_budget=within,
    )


def tpot_ms(row: Outcome) -> float | None:
    """Mean time per output token after the first; None with fewer than two."""
    if row.ttft_ms is None or row.total_ms is None or row.completion_tokens < 2:
        return None
    return max(0.0, row.total_ms - row.ttft_ms) / (row.completion_tokens - 1)


def _in_budget(row: Outcome, ttft_budget_ms: float | None, tpot_budget_ms: float | None) -> bool:
    tpot = tpot_ms(row)
    first = ttft_budget_ms is None or (row.ttft_ms or 0.0) <= ttft_budget_ms
    return first and (tpot_budget_ms is None or tpot is None or tpot <= tpot_budget_ms)


def _at(ordered: Sequence[float], share: float) -> float | None:
    """The nearest-rank percentile."""
    return ordered[max(0, ceil(share * len(ordered)) - 1)] if ordered else None
