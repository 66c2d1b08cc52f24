"""How well each tenant's latency budgets are kept, and what follows from it.

Of the requests that carry a budget, those that kept it and those that did not are counted by
tenant. Two answers come back. `gain`: a tenant below its percentile is given more way, one above
it can wait. `margin`: what a predicted wait is multiplied with at admission; it grows with every
miss and shrinks with every hit, in the proportion of the misses aimed at, so that it settles where
the promised share is kept, however the prediction errs (quantile tracking).
"""

from collections import OrderedDict
from dataclasses import dataclass

from engine.types import TenantAttainment

MOST_TENANTS = 1024
"""Tenants remembered one by one, those seen last; the counts of the others go to `OTHERS`."""
OTHERS = "other"
MEMORY = 0.05
"""What a request moves the smoothed attainment."""
ENOUGH = 10
"""Requests before the smoothed attainment has a say."""
MARGIN_RATE = 0.15
MISSES_AIMED_AT = 0.5
"""Of the misses that the percentile allows, so many are aimed at: the rest is for surprises."""
FORGIVENESS = 0.02
LEAST_MARGIN, MOST_MARGIN = 1.0, 4.0
LEAST_GAIN, MOST_GAIN = 0.5, 2.0


@dataclass(slots=True)
class Kept:
    """One tenant's counts: of first tokens, and of times per output token."""

    ttft_met: int = 0
    ttft_missed: int = 0
    tpot_met: int = 0
    tpot_missed: int = 0
    refused: int = 0  # because no budget could be kept

    def add(self, other: "Kept") -> None:
        self.ttft_met += other.ttft_met
        self.ttft_missed += other.ttft_missed
        self.tpot_met += other.tpot_met
        self.tpot_missed += other.tpot_missed
        self.refused += other.refused


@dataclass(slots=True)
class _Tenant:
    kept: Kept
    percentile: float = 0.95
    smoothed: float = 1.0
    seen: int = 0
    margin: float = 1.0


class Attainment:
    def __init__(self) -> None:
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()  # seen longest ago first
        self._others = Kept()

    def gain(self, tenant: str) -> float:
        """1 at the percentile; up to 2 below it, down to a half above."""
        found = self._tenants.get(tenant)
        if found is None or found.seen < ENOUGH:
            return 1.0
        missing = (found.percentile - found.smoothed) / max(0.01, 1.0 - found.percentile)
        return min(MOST_GAIN, max(LEAST_GAIN, 1.0 + 0.5 * missing))

    def margin(self, tenant: str) -> float:
        """What to multiply a predicted wait with before it is held against the budget."""
        found = self._tenants.get(tenant)
        return 1.0 if found is None else found.margin

    def first_token(self, tenant: str, percentile: float, *, met: bool) -> None:
        found = self._of(tenant, percentile)
        misses = MISSES_AIMED_AT * (1.0 - percentile)
        if met:
            found.kept.ttft_met += 1
            found.margin *= 1.0 - MARGIN_RATE * misses
        else:
            found.kept.ttft_missed += 1
            found.margin *= 1.0 + MARGIN_RATE * (1.0 - misses)
        found.margin = min(MOST_MARGIN, max(LEAST_MARGIN, found.margin))
        self._smooth(found, met=met)

    def finished(self, tenant: str, percentile: float, *, met: bool) -> None:
        """The answer is complete: whether its time per output token was kept."""
        found = self._of(tenant, percentile)
        if met:
            found.kept.tpot_met += 1
        else:
            found.kept.tpot_missed += 1
        self._smooth(found, met=met)

    def refused(self, tenant: str, percentile: float) -> None:
        """Refused at once. With nobody admitted nothing is learned: the margin drifts back to 1."""
        found = self._of(tenant, percentile)
        found.kept.refused += 1
        found.margin += FORGIVENESS * (1.0 - found.margin)

    def counts(self) -> dict[str, TenantAttainment]:
        """By tenant; what was forgotten one by one is under `OTHERS`."""
        counts = {tenant: _report(t.kept, t.margin) for tenant, t in self._tenants.items()}
        if self._others != Kept():
            counts[OTHERS] = _report(self._others, 1.0)
        return counts

    def _smooth(self, found: _Tenant, *, met: bool) -> None:
        found.seen += 1
        found.smoothed += MEMORY * (met - found.smoothed)

    def _of(self, tenant: str, percentile: float) -> _Tenant:
        found = self._tenants.get(tenant)
        if found is None:
            found = self._tenants[tenant] = _Tenant(Kept())
            if len(self._tenants) > MOST_TENANTS:
                _, forgotten = self._tenants.popitem(last=False)
                self._others.add(forgotten.kept)
        else:
            self._tenants.move_to_end(tenant)
        found.percentile = percentile
        return found


def _report(kept: Kept, margin: float) -> TenantAttainment:
    return TenantAttainment(
        kept.ttft_met, kept.ttft_missed, kept.tpot_met, kept.tpot_missed, kept.refused, margin
    )
