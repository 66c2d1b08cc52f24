"""From outcomes to figures: percentiles, goodput, attainment by tenant, refusals, fairness."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from app.bench.outcomes import Outcome


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of milliseconds; None where nothing was measured."""

    p50: float | None
    p95: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> "Percentiles":
        found = np.fromiter(values, dtype=float)
        if not len(found):
            return cls(None, None, None)
        p50, p95, p99 = np.percentile(found, [50, 95, 99]).tolist()
        return cls(p50, p95, p99)


@dataclass(frozen=True, slots=True)
class TenantReport:
    """One tenant. `attainment`: of its answered requests, those inside the budget."""

    tenant: str
    offered: int
    answered: int
    refused: int
    attainment: float | None
    percentile: float  # what the tenant was promised
    served_share: float  # of the tokens it asked for
    ttft_ms: Percentiles

    @property
    def attains(self) -> bool:
        return self.attainment is None or self.attainment >= self.percentile


@dataclass(frozen=True, slots=True)
class Report:
    """One run. Goodput counts what was refused among what was offered."""

    offered: int
    answered: int
    good: int
    seconds: float
    output_tokens_per_s: float
    total_tokens_per_s: float  # prompts of answered requests included
    ttft_ms: Percentiles
    tpot_ms: Percentiles  # a request's mean
    gap_ms: Percentiles  # between tokens of one request
    jain: float  # of the served shares of the tenants; 1 is equal
    refused: dict[str, int]  # by cause
    tenants: list[TenantReport]

    @property
    def goodput(self) -> float:
        """Good requests as a share of those offered."""
        return self.good / self.offered if self.offered else 1.0

    @property
    def tenants_attaining(self) -> float:
        """Tenants whose answered requests meet their percentile, as a share."""
        return sum(t.attains for t in self.tenants) / len(self.tenants) if self.tenants else 1.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "goodput": self.goodput,
            "tenants_attaining": self.tenants_attaining,
        }


def jain_index(values: Sequence[float]) -> float:
    """(sum x)^2 / (n sum x^2): 1 when all are equal, 1/n when one has all."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def summarise(outcomes: Sequence[Outcome], seconds: float) -> Report:
    """Figures over all `outcomes`; `seconds` is the time in which they were offered and served."""
    by_tenant: defaultdict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_tenant[outcome.tenant].append(outcome)
    tenants = [_tenant_report(name, theirs) for name, theirs in sorted(by_tenant.items())]
    tokens = sum(outcome.tokens for outcome in outcomes)
    return Report(
        offered=len(outcomes),
        answered=sum(outcome.answered for outcome in outcomes),
        good=sum(outcome.good for outcome in outcomes),
        seconds=seconds,
        output_tokens_per_s=tokens / seconds,
        total_tokens_per_s=sum(map(_served_tokens, outcomes)) / seconds,
        ttft_ms=Percentiles.of(_ttfts(outcomes)),
        tpot_ms=Percentiles.of(o.tpot_ms for o in outcomes if o.tpot_ms is not None),
        gap_ms=Percentiles.of(gap for outcome in outcomes for gap in outcome.gaps_ms),
        jain=jain_index([tenant.served_share for tenant in tenants]),
        refused=dict(Counter(o.refused for o in outcomes if o.refused).most_common()),
        tenants=tenants,
    )


def _tenant_report(tenant: str, outcomes: list[Outcome]) -> TenantReport:
    answered = [outcome for outcome in outcomes if outcome.answered]
    asked = sum(outcome.asked_tokens for outcome in outcomes)
    return TenantReport(
        tenant=tenant,
        offered=len(outcomes),
        answered=len(answered),
        refused=sum(bool(outcome.refused) for outcome in outcomes),
        attainment=sum(o.good for o in answered) / len(answered) if answered else None,
        percentile=outcomes[0].budget.percentile,
        served_share=sum(map(_served_tokens, outcomes)) / asked if asked else 1.0,
        ttft_ms=Percentiles.of(_ttfts(outcomes)),
    )


def _served_tokens(outcome: Outcome) -> int:
    return outcome.asked_tokens if outcome.answered else outcome.tokens


def _ttfts(outcomes: Iterable[Outcome]) -> Iterable[float]:
    return (outcome.ttft_ms for outcome in outcomes if outcome.ttft_ms is not None)
