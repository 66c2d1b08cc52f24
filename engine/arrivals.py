"""What tenants have been sending of late, and how much of the device it leaves to one of them.

Requests that arrive later may still be served earlier: those of tenants that were served less. How
much they will bring is not known, but their rate is, and how unevenly it comes.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from engine.policy import Policy

MEMORY_MS = 2_000.0
"""What arrived so long ago counts 1/e."""
LEAST_TOKENS = 1.0
"""Below so much that counts, a tenant is forgotten."""
SWEEP_ABOVE = 64


@dataclass(slots=True)
class _Arrived:
    """A tenant's prompts as exponentially fading sums, true at `at_ms`."""

    weight: float
    at_ms: float
    requests: float = 0.0
    tokens: float = 0.0
    squares: float = 0.0

    def fade(self, now_ms: float) -> None:
        kept = math.exp((self.at_ms - now_ms) / MEMORY_MS)
        self.requests *= kept
        self.tokens *= kept
        self.squares *= kept
        self.at_ms = now_ms


@dataclass(frozen=True, slots=True)
class Overtaking:
    """Work that arrives later and is served earlier.

    `share`: of the device, what it leaves. `variance_ms`: of the work that arrives in a
    millisecond, in ms^2: what it varies by in W ms is the root of W times this.
    """

    share: float = 1.0
    variance_ms: float = 0.0


NONE = Overtaking()


@dataclass(frozen=True, slots=True)
class Question:
    """`token_ms`: what a prompt token takes; `answer_cost`: what a usual answer is charged, in
    prompt tokens; `within_ms`: the time that is asked about."""

    token_ms: float
    answer_cost: float
    within_ms: float


class Arrivals:
    """Prompt tokens admitted by tenant, whoever waits now."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._tenants: dict[str, _Arrived] = {}
        self._sweep_above = SWEEP_ABOVE

    def __len__(self) -> int:
        """Tenants remembered."""
        return len(self._tenants)

    def add(self, tenant: str, weight: float, tokens: int, now_ms: float) -> None:
        """A request has come in."""
        found = self._tenants.get(tenant)
        if found is None:
            found = self._tenants[tenant] = _Arrived(weight, now_ms)
            if len(self._tenants) > self._sweep_above:
                self._sweep(now_ms)
        found.fade(now_ms)
        found.weight = weight
        found.requests += 1.0
        found.tokens += tokens
        found.squares += float(tokens) * tokens

    def overtaking(
        self, tenant: str, weight: float, now_ms: float, asked: "Question"
    ) -> Overtaking:
        """What will go before a request of the tenant that has a budget for its first token.

        It comes from tenants that are further behind than the tenant's lead, each until it is not:
        what others send later is passed once the request is urgent.
        """
        level = self._policy.priority(tenant) - self._policy.lead(tenant)
        rates: list[tuple[float, float]] = []
        variance_ms = 0.0
        for name, other in self._tenants.items():
            behind = level - self._policy.priority(name)
            if name == tenant or behind <= 0.0:
                continue
            other.fade(now_ms)
            if not other.tokens:
                continue
            most = behind * other.weight / (other.requests * asked.answer_cost + other.tokens)
            due = asked.within_ms / MEMORY_MS
            overtakes = min(1.0, most / due) if due else 1.0
            rates.append((overtakes * other.tokens * asked.token_ms / MEMORY_MS, other.weight))
            variance_ms += overtakes * other.squares * asked.token_ms**2 / MEMORY_MS
        if not rates:
            return NONE
        return Overtaking(fair_share(weight, rates), variance_ms)

    def _sweep(self, now_ms: float) -> None:
        for name in list(self._tenants):
            found = self._tenants[name]
            found.fade(now_ms)
            if found.tokens < LEAST_TOKENS:
                del self._tenants[name]
        self._sweep_above = max(SWEEP_ABOVE, 2 * len(self._tenants))


def fair_share(weight: float, others: Iterable[tuple[float, float]]) -> float:
    """What one that wants everything gets beside `others`, (demand, weight) each: max-min fair.

    Who wants less than its share gets what it wants; the rest is divided by weight.
    """
    left, weights = 1.0, weight
    waiting = sorted(others, key=lambda other: other[0] / other[1])
    weights += sum(other[1] for other in waiting)
    for demand, theirs in waiting:
        if demand >= left * theirs / weights:
            break
        left -= demand
        weights -= theirs
    return left * weight / weights
