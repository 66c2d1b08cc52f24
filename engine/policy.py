"""Who runs next, who is preempted: functions of counters, never of a clock.

`fcfs` goes by arrival alone. `vtc` is the virtual token counter of Sheng et al., "Fairness in
Serving Large Language Models" (OSDI 2024): the tenant that was served least, by weight, is next;
a tenant that comes back starts level with the rest, so idling earns nothing.
"""

import heapq
from typing import Literal, Protocol

SYSTEM_TENANT = "system"
"""Whom validation probes are charged to."""
SYSTEM_WEIGHT = 0.1
"""A probe's share against a tenant's of weight 1."""

OUTPUT_COST = 2.0  # an output token reads all weights and the KV again; a prompt token shares them
RANK_COST = 1.0 / 256  # a rank-256 adapter about doubles the work of a token
LOAD_BYTES_PER_TOKEN = 1 << 16  # bringing in 64 KiB of adapter costs about a prompt token

AGED_SHARE = 4
"""One admission in so many goes to the longest waiting, once it has waited too long."""


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

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._active: set[str] = set()
        self._departed: list[tuple[float, str]] = []  # heap of those that left ahead of the rest
        self._level = 0.0  # the counter of the tenant admitted last: what "served least" means

    def __len__(self) -> int:
        """Tenants remembered; those with nothing here and no lead are not."""
        return len(self._counters)

    def priority(self, tenant: str) -> float:
        return self._counters.get(tenant, self._level)

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


def make_policy(name: Literal["vtc", "fcfs"]) -> Policy:
    return VirtualTokenCounter() if name == "vtc" else FirstComeFirstServed()
