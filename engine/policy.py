"""Who runs next, who is preempted: functions of counters, never of a clock.

`fcfs` goes by arrival alone. `vtc` is the virtual token counter of Sheng et al., "Fairness in
Serving Large Language Models" (OSDI 2024): the tenant that was served least, by weight, is next;
a tenant that comes back starts level with the rest, so idling earns nothing. `slo` is vtc for whom
time does not press: a request whose latency budget is running out goes first, as long as its
tenant was not served more than `lead` above the one served least. That lead is the price of
promptness: it bounds what any tenant can lose by another's budget.
"""

import heapq
from typing import Literal, Protocol

from engine.attainment import Attainment

SYSTEM_TENANT = "system"
"""Whom validation probes are charged to."""
SYSTEM_WEIGHT = 0.1
"""A probe's share against a tenant's of weight 1."""

OUTPUT_COST = 2.0  # an output token reads all weights and the KV again; a prompt token shares them
RANK_COST = 1.0 / 256  # a rank-256 adapter about doubles the work of a token
LOAD_BYTES_PER_TOKEN = 1 << 16  # bringing in 64 KiB of adapter costs about a prompt token

AGED_SHARE = 4
"""One admission in so many goes to the longest waiting, once it has waited too long."""


URGENT_LEAD = 2048.0
"""How far above the tenant served least one may be, by weight, and still go first when urgent."""
URGENT_SHARE = 0.25
"""A request is urgent once this share of its time to the first token is all that is left."""
URGENT_TOKENS = 4.0
"""One that was set aside after its first token is urgent once its next one is due in the time that
its budget allows for so many."""

PolicyName = Literal["slo", "vtc", "fcfs"]


def token_cost(prompt_tokens: int, output_tokens: int, rank: int) -> float:
    """What a part of a step costs, in prompt tokens of the base model alone."""
    return (prompt_tokens + OUTPUT_COST * output_tokens) * (1.0 + RANK_COST * rank)


def load_cost(adapter_bytes: int) -> float:
    """What bringing in an adapter costs, in prompt tokens."""
    return adapter_bytes / LOAD_BYTES_PER_TOKEN


def serves_the_oldest(admissions: int, waited_ms: float, aging_ms: float) -> bool:
    """Whether this admission goes by age instead of by share, so that every wait is bounded."""
    return admissions % AGED_SHARE == 0 and waited_ms > aging_ms


class Policy(Protocol):
    """Tenants against each other. Priorities never fall while a tenant is active."""

    keeps_budgets: bool
    """Whether latency budgets count: admission by prediction, urgency, chunks by slack."""
    attainment: Attainment
    """How well each tenant's budgets were kept."""

    def lead(self, tenant: str) -> float:
        """How far above the least priority the tenant may be and still go first when urgent."""
        ...

    def priority(self, tenant: str) -> float:
        """Lower is served first, and preempted last."""
        ...

    def activate(self, tenant: str) -> None:
        """The tenant has something in the engine, after a time with nothing."""
        ...

    def deactivate(self, tenant: str) -> None:
        """The last request of the tenant has left."""
        ...

    def charge(self, tenant: str, weight: float, cost: float) -> None:
        """The tenant was served `cost` prompt tokens' worth."""
        ...

    def admitted(self, tenant: str) -> None:
        """A request of the tenant was admitted because the tenant came first."""
        ...


class FirstComeFirstServed:
    """All tenants alike: what is left is the order of arrival."""

    keeps_budgets = False

    def __init__(self) -> None:
        self.attainment = Attainment()

    def lead(self, tenant: str) -> float:
        return 0.0

    def priority(self, tenant: str) -> float:
        return 0.0

    def activate(self, tenant: str) -> None:
        return

    def deactivate(self, tenant: str) -> None:
        return

    def charge(self, tenant: str, weight: float, cost: float) -> None:
        return

    def admitted(self, tenant: str) -> None:
        return


class VirtualTokenCounter:
    """Weighted tokens served, by tenant."""

    keeps_budgets = False

    def __init__(self) -> None:
        self.attainment = Attainment()
        self._counters: dict[str, float] = {}
        self._active: set[str] = set()
        self._departed: list[tuple[float, str]] = []  # heap of those that left ahead of the rest
        self._level = 0.0  # the counter of the tenant admitted last: what "served least" means

    def __len__(self) -> int:
        """Tenants remembered; those with nothing here and no lead are not."""
        return len(self._counters)

    def priority(self, tenant: str) -> float:
        return self._counters.get(tenant, self._level)

    def lead(self, tenant: str) -> float:
        return 0.0

    def activate(self, tenant: str) -> None:
        self._active.add(tenant)
        self._counters[tenant] = max(self.priority(tenant), self._level)

    def deactivate(self, tenant: str) -> None:
        """A tenant that was served more than the rest stays so until they have caught up."""
        self._active.discard(tenant)
        heapq.heappush(self._departed, (self._counters[tenant], tenant))
        self._forget_departed()

    def charge(self, tenant: str, weight: float, cost: float) -> None:
        if tenant in self._active:
            self._counters[tenant] += cost / weight

    def admitted(self, tenant: str) -> None:
        self._level = max(self._level, self.priority(tenant))
        self._forget_departed()

    def _forget_departed(self) -> None:
        while self._departed and self._departed[0][0] <= self._level:
            _, tenant = heapq.heappop(self._departed)
            if tenant not in self._active:
                self._counters.pop(tenant, None)


class LatencyBudgets(VirtualTokenCounter):
    """The counters, and how far urgency may go against them."""

    keeps_budgets = True

    def __init__(self, lead: float = URGENT_LEAD) -> None:
        super().__init__()
        self.usual_lead = lead

    def lead(self, tenant: str) -> float:
        """Twice as far for a tenant below its percentile; never further."""
        return self.usual_lead * self.attainment.gain(tenant)


def make_policy(name: PolicyName) -> Policy:
    match name:
        case "slo":
            return LatencyBudgets()
        case "vtc":
            return VirtualTokenCounter()
        case "fcfs":
            return FirstComeFirstServed()
