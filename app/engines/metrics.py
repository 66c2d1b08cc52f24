"""The engines' own figures in /metrics, as the router last heard them (once a second).

Every api process shows every engine, so aggregate over processes with max by (engine), not sum.
A figure of an engine that does not answer is left out, `loramux_engine_up` is 0.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from app.bounded_labels import OTHER
from app.inference.engines import Engine
from engine.types import STEP_BOUNDS_MS, EngineStatus

OUTCOMES = ("ttft_met", "ttft_missed", "tpot_met", "tpot_missed", "refused")

Values = Callable[[EngineStatus], Mapping[str, float]]
"""A status -> value by the family's second label ("" where it has none)."""

GAUGES: dict[str, tuple[str, str, Values]] = {
    "loramux_engine_requests": (
        "Requests in the engine.",
        "state",
        lambda s: {"running": s.running, "waiting": s.waiting},
    ),
    "loramux_engine_draining": (
        "1 while it takes no new requests.",
        "",
        lambda s: {"": float(s.draining)},
    ),
    "loramux_engine_arena_bytes": (
        "The arena, which KV blocks and adapters share.",
        "",
        lambda s: {"": s.extents_total * s.extent_bytes},
    ),
    "loramux_engine_kv_bytes": (
        "KV blocks: of running requests, and kept for their prefix.",
        "state",
        lambda s: {
            "used": s.kv_blocks_used * s.extent_bytes,
            "cached": s.kv_blocks_cached * s.extent_bytes,
        },
    ),
    "loramux_engine_adapter_bytes": (
        "Bytes of the adapters held, by tier.",
        "tier",
        lambda s: {"device": s.device_adapter_bytes, "host": s.host_adapter_bytes},
    ),
    "loramux_engine_adapters": (
        "Adapters held, by the best tier that each is in.",
        "tier",
        lambda s: {
            tier: sum(item.tier == tier for item in s.adapters)
            for tier in ("device", "host", "loading", "quarantined")
        },
    ),
}
COUNTERS: dict[str, tuple[str, str, Values]] = {
    "loramux_engine_tokens": (
        "Tokens of all requests, also of validation and of those never billed.",
        "kind",
        lambda s: {"prompt": s.prompt_tokens_total, "completion": s.completion_tokens_total},
    ),
    "loramux_engine_step_rows": (
        "Rows of the steps: what batches are made of.",
        "kind",
        lambda s: {"decode": s.step_counts.decode_rows, "prefill": s.step_counts.prefill_rows},
    ),
    "loramux_engine_step_prefill_tokens": (
        "Prompt tokens computed in steps.",
        "",
        lambda s: {"": s.step_counts.prefill_tokens},
    ),
    "loramux_engine_step_adapter_rows": (
        "Rows of the steps that ran with an adapter.",
        "",
        lambda s: {"": s.step_counts.adapter_rows},
    ),
    "loramux_engine_step_adapters": (
        "Different adapters in the steps, added up: over the steps it is how mixed a batch is.",
        "",
        lambda s: {"": s.step_counts.adapters},
    ),
    "loramux_engine_preemptions": (
        "Sequences that gave up their KV blocks and were computed again.",
        "",
        lambda s: {"": s.preemptions_total},
    ),
    "loramux_engine_adapter_loads": (
        "Adapters read from the store.",
        "",
        lambda s: {"": s.loads_total},
    ),
    "loramux_engine_adapter_evictions": (
        "Adapters that left the device for another one or for KV blocks.",
        "",
        lambda s: {"": s.evictions_total},
    ),
}


class EngineCollector(Collector):
    """`engines` are asked for at every scrape; nothing is sent to them."""

    def __init__(self, engines: Callable[[], Iterable[Engine]], tenants: int = 50) -> None:
        """`tenants`: how many have series of their own, for as long as the process lives."""
        self._engines = engines
        self._most_tenants = tenants
        self._tenants: set[str] = set()

    def collect(self) -> Iterator[Metric]:
        engines = list(self._engines())
        up = GaugeMetricFamily(
            "loramux_engine_up", "1 when the engine answers and may be used.", labels=["engine"]
        )
        for engine in engines:
            up.add_metric([engine.address], float(engine.usable))
        yield up
        answering = {e.address: e.status for e in engines if e.client.alive and e.status}
        for kind, families in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, (text, label, values) in families.items():
                labels = ["engine", label] if label else ["engine"]
                family = kind(name, text, labels=labels)
                for address, status in answering.items():
                    for value, figure in values(status).items():
                        family.add_metric([address, value] if label else [address], figure)
                yield family
        yield _step_seconds(answering)
        yield self._budgets(answering)
        yield self._resident(answering)

    def _label(self, tenant: str) -> str:
        if len(self._tenants) < self._most_tenants:
            self._tenants.add(tenant)
        return tenant if tenant in self._tenants else OTHER

    def _resident(self, answering: Mapping[str, EngineStatus]) -> Metric:
        family = GaugeMetricFamily(
            "loramux_engine_tenant_adapter_bytes",
            "Bytes of each tenant's adapters, by tier; they add up to the engine's.",
            labels=["engine", "tenant", "tier"],
        )
        for address, status in answering.items():
            held: Counter[tuple[str, str]] = Counter()
            for tenant, resident in status.resident.items():
                label = self._label(tenant)
                held[label, "device"] += resident.device_bytes
                held[label, "host"] += resident.host_bytes
            for (label, tier), nbytes in held.items():
                family.add_metric([address, label, tier], nbytes)
        return family

    def _budgets(self, answering: Mapping[str, EngineStatus]) -> Metric:
        family = CounterMetricFamily(
            "loramux_engine_budgets",
            "Latency budgets kept and missed, and requests refused because none could be kept.",
            labels=["engine", "tenant", "outcome"],
        )
        for address, status in answering.items():
            counts: Counter[tuple[str, str]] = Counter()
            for tenant, kept in status.attainment.items():
                label = self._label(tenant)
                for outcome in OUTCOMES:
                    counts[label, outcome] += getattr(kept, outcome)
            for (label, outcome), count in counts.items():
                family.add_metric([address, label, outcome], count)
        return family


def _step_seconds(answering: Mapping[str, EngineStatus]) -> Metric:
    family = HistogramMetricFamily(
        "loramux_engine_step_seconds", "Time of a step in the executor.", labels=["engine"]
    )
    bounds = [str(bound / 1000) for bound in STEP_BOUNDS_MS] + ["+Inf"]
    for address, status in answering.items():
        total, buckets = 0, []
        for bound, count in zip(bounds, status.step_counts.buckets, strict=False):
            total += count
            buckets.append((bound, float(total)))
        if buckets:
            family.add_metric([address], buckets, status.step_counts.ms / 1000)
    return family
