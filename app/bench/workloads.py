"""Who asks for what, and when: the same request lists for the simulator and for a live server.

    requests = generate(WORKLOADS["zipf"], rate_per_s=20.0, duration_ms=60_000.0, seed=1)

Popularity says which adapter a request names: `identical` one, `uniform` any, `zipf` few of many
(exponent 1.5), `distinct` each in turn, so that a batch holds as many as it can. Adapter a belongs
to tenant a mod tenants. Equal seeds give equal lists.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from app.bench.arrivals import arrival_times_ms

Popularity = Literal["identical", "uniform", "zipf", "distinct"]
POPULARITIES: tuple[Popularity, ...] = ("identical", "uniform", "zipf", "distinct")
ZIPF_EXPONENT = 1.5
RANKS: dict[str, tuple[int, ...]] = {"8": (8,), "16": (16,), "64": (64,), "mix": (8, 16, 64)}


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens, lognormal: `median`, `sigma` of the logarithm, cut to [least, most]."""

    median: float
    sigma: float
    least: int
    most: int

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        drawn = rng.lognormal(np.log(self.median), self.sigma, size=count)
        lengths: list[int] = np.clip(np.rint(drawn), self.least, self.most).astype(int).tolist()
        return lengths


@dataclass(frozen=True, slots=True)
class Budget:
    """A latency promise; None promises nothing. Token k is due at first token + k x tpot."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    percentile: float = 0.95


NO_BUDGET = Budget()


@dataclass(frozen=True, slots=True)
class Jam:
    """Long prompts that land together, again and again, from a tenant of their own."""

    prompts: int = 10
    prompt_tokens: int = 4096
    output_tokens: int = 16
    first_ms: float = 5_000.0
    every_ms: float = 20_000.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Traffic without its rate. `adapters` 0: the base model alone."""

    popularity: Popularity = "zipf"
    adapters: int = 100
    tenants: int = 20
    ranks: tuple[int, ...] = RANKS["mix"]  # adapters take turns
    cv: float = 1.0  # of the gaps between arrivals
    prompt: Lengths = Lengths(256, 0.8, 16, 2048)
    output: Lengths = Lengths(128, 0.7, 4, 512)
    max_tokens: int = 512  # what requests ask for; the answer ends earlier, at `output`
    budgets: tuple[Budget, ...] = (NO_BUDGET,)  # tenants take turns
    flood: float = 1.0  # tenant 0 sends so many times what another tenant sends
    jam: Jam | None = None

    def rank_of(self, adapter: int) -> int:
        return self.ranks[adapter % len(self.ranks)]

    def tenant_of(self, adapter: int) -> int:
        return adapter % self.tenants

    def budget_of(self, tenant: int) -> Budget:
        return self.budgets[tenant % len(self.budgets)]

    def adapter_shares(self) -> np.ndarray:
        """How often each adapter is named: [adapters] float64, sums to 1."""
        number = np.arange(1, self.adapters + 1, dtype=float)
        if self.popularity == "identical":
            shares = np.where(number == 1, 1.0, 0.0)
        elif self.popularity == "zipf":
            shares = number**-ZIPF_EXPONENT
        else:
            shares = np.ones_like(number)
        shares = np.asarray(shares / shares.sum())
        first = np.arange(self.adapters) % self.tenants == 0
        theirs = shares[~first].sum()
        if self.flood != 1.0 and theirs > 0:
            others = min(self.tenants, self.adapters) - 1
            shares[first] *= self.flood / (self.flood + others) / shares[first].sum()
            shares[~first] *= others / (self.flood + others) / theirs
        return np.asarray(shares)


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """One request of a workload."""

    at_ms: float  # from the start of the run
    tenant: int
    adapter: int  # -1: the base model
    rank: int
    prompt_tokens: int
    output_tokens: int  # how long the answer will be; the server is not told
    max_tokens: int  # what the request asks for
    budget: Budget = NO_BUDGET


def generate(
    workload: Workload, *, rate_per_s: float, duration_ms: float, seed: int
) -> list[TimedRequest]:
    """All requests of a run, by arrival."""
    rng = np.random.default_rng(seed)
    times = arrival_times_ms(rng, rate_per_s, workload.cv, duration_ms)
    count = len(times)
    adapters, tenants = _who(workload, rng, count)
    prompts, outputs = workload.prompt.draw(rng, count), workload.output.draw(rng, count)
    requests = [
        TimedRequest(
            at_ms=at_ms,
            tenant=tenant,
            adapter=adapter,
            rank=workload.rank_of(adapter) if adapter >= 0 else 0,
            prompt_tokens=prompt,
            output_tokens=min(output, workload.max_tokens),
            max_tokens=workload.max_tokens,
            budget=workload.budget_of(tenant),
        )
        for at_ms, tenant, adapter, prompt, output in zip(
            times, tenants, adapters, prompts, outputs, strict=True
        )
    ]
    if workload.jam is not None:
        requests += _jams(workload, workload.jam, duration_ms)
    return sorted(requests, key=lambda request: request.at_ms)


def _who(workload: Workload, rng: np.random.Generator, count: int) -> tuple[list[int], list[int]]:
    if workload.adapters == 0:
        tenants: list[int] = rng.integers(workload.tenants, size=count).tolist()
        return [-1] * count, tenants
    if workload.popularity == "distinct" and workload.flood == 1.0:
        adapters = [index % workload.adapters for index in range(count)]
    else:
        adapters = rng.choice(workload.adapters, size=count, p=workload.adapter_shares()).tolist()
    return adapters, [workload.tenant_of(adapter) for adapter in adapters]


def _jams(workload: Workload, jam: Jam, duration_ms: float) -> list[TimedRequest]:
    starts = np.arange(jam.first_ms, duration_ms, jam.every_ms).tolist()
    one = TimedRequest(
        at_ms=0.0,
        tenant=workload.tenants,
        adapter=-1,
        rank=0,
        prompt_tokens=jam.prompt_tokens,
        output_tokens=jam.output_tokens,
        max_tokens=jam.output_tokens,
    )
    return [replace(one, at_ms=at_ms) for at_ms in starts for _ in range(jam.prompts)]


WORKLOADS: dict[str, Workload] = {
    **{popularity: Workload(popularity) for popularity in POPULARITIES},
    "bursty": Workload("zipf", cv=4.0),
    "jam": Workload("zipf", jam=Jam()),
    "flood": Workload("uniform", flood=10.0),
}
"""By the names that commands take."""
