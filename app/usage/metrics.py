"""Counters of the ledger, moved when a row is closed, so that they equal its sums.

Rows that the worker's sweep closes are counted in SQL instead: see `swept`.
"""

from collections.abc import Iterable
from functools import lru_cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from app.bounded_labels import BoundedLabels
from app.metrics import REGISTRY
from app.usage.entries import FinalEntry

LATENCY_BUCKETS_S = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2.5, 4, 8, 16, 32, 64)


TPOT_BUCKETS_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2)
WAIT_BUCKETS_S = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TENANTS, ADAPTERS = 50, 100
Attributed = tuple[str, str | None, FinalEntry]
"""(tenant's id, adapter's id or None, how the request ended)"""


class UsageMetrics:
    """Bounded labels: statuses, kinds of token, and the ids of so many tenants and adapters."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "loramux_requests", "Ledger rows closed by this process", ["status"], registry=registry
        )
        self._tokens = Counter(
            "loramux_tokens", "Tokens of the rows that it closed", ["kind"], registry=registry
        )
        self._engine = Counter(
            "loramux_engine_seconds", "Engine time of these rows", ["phase"], registry=registry
        )
        self._adapter = Counter(
            "loramux_adapter_byte_seconds",
            "Bytes of adapters times the seconds for which these rows pinned them",
            registry=registry,
        )
        self._open = Gauge(
            "loramux_open_requests", "Admitted requests of this process", registry=registry
        )
        self._spooled = Gauge(
            "loramux_spooled_rows", "Final rows that wait for the database", registry=registry
        )
        self._ttft = Histogram(
            "loramux_time_to_first_token_seconds",
            "From admission to the first token",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )

        self._tpot = Histogram(
            "loramux_time_per_output_token_seconds",
            "From the first token to the end, over the tokens after the first",
            buckets=TPOT_BUCKETS_S,
            registry=registry,
        )
        self._queue = Histogram(
            "loramux_queue_wait_seconds",
            "From the engine's receipt until a request first ran",
            buckets=WAIT_BUCKETS_S,
            registry=registry,
        )
        self._adapter_wait = Histogram(
            "loramux_adapter_wait_seconds",
            "The same until its adapter was usable, of requests that had to wait for it",
            buckets=WAIT_BUCKETS_S,
            registry=registry,
        )
        self._starts = Counter(
            "loramux_starts",
            "Requests that the engine counted, by whether the adapter had to be loaded",
            ["start"],
            registry=registry,
        )
        self._by_tenant = Counter(
            "loramux_tenant_requests",
            "The same as loramux_requests",
            ["tenant", "status"],
            registry=registry,
        )
        self._tenant_tokens = Counter(
            "loramux_tenant_tokens",
            "The same as loramux_tokens",
            ["tenant", "kind"],
            registry=registry,
        )
        self._by_adapter = Counter(
            "loramux_adapter_requests",
            "The same as loramux_requests",
            ["adapter", "status"],
            registry=registry,
        )
        self._adapter_tokens = Counter(
            "loramux_adapter_tokens",
            "The same as loramux_tokens",
            ["adapter", "kind"],
            registry=registry,
        )
        self.tenants, self.adapters = BoundedLabels(TENANTS), BoundedLabels(ADAPTERS)

    def attributed(self, closed: Iterable[Attributed]) -> None:
        """The same rows as in `closed`, by whose they were, and how long they took."""
        for tenant_id, adapter_id, entry in closed:
            tenant, adapter = self.tenants.label(tenant_id), self.adapters.label(adapter_id)
            self._by_tenant.labels(tenant, entry.status).inc()
            self._by_adapter.labels(adapter, entry.status).inc()
            for kind, tokens in tokens_of(entry):
                self._tenant_tokens.labels(tenant, kind).inc(tokens)
                self._adapter_tokens.labels(adapter, kind).inc(tokens)
            self._observe_times(entry, has_adapter=adapter_id is not None)

    def _observe_times(self, entry: FinalEntry, *, has_adapter: bool) -> None:
        if entry.ttft_ms is not None and entry.total_ms is not None and entry.completion_tokens > 1:
            decoding_ms = entry.total_ms - entry.ttft_ms
            self._tpot.observe(decoding_ms / 1000.0 / (entry.completion_tokens - 1))
        if entry.queue_ms is None:
            return
        self._queue.observe(entry.queue_ms / 1000.0)
        waited_ms = entry.adapter_wait_ms or 0.0
        self._starts.labels("base" if not has_adapter else "cold" if waited_ms else "warm").inc()
        if has_adapter and waited_ms:
            self._adapter_wait.observe(waited_ms / 1000.0)

    def closed(self, entries: Iterable[FinalEntry]) -> None:
        for entry in entries:
            self._requests.labels(entry.status).inc()
            for kind, tokens in tokens_of(entry):
                self._tokens.labels(kind).inc(tokens)
            self._engine.labels("prefill").inc(entry.prefill_us / 1e6)
            self._engine.labels("decode").inc(entry.decode_us / 1e6)
            self._adapter.inc(entry.adapter_byte_s)
            if entry.ttft_ms is not None:
                self._ttft.observe(entry.ttft_ms / 1000.0)

    def running(self, count: int) -> None:
        self._open.set(count)

    def spooled(self, count: int) -> None:
        self._spooled.set(count)


def tokens_of(entry: FinalEntry) -> tuple[tuple[str, int], ...]:
    """(kind, tokens) of one row."""
    return (
        ("prompt", entry.prompt_tokens),
        ("cached", entry.cached_tokens),
        ("completion", entry.completion_tokens),
        ("overshoot", entry.overshoot_tokens),
    )


@lru_cache(maxsize=1)
def usage_metrics() -> UsageMetrics:
    """This process's counters, which /metrics shows."""
    return UsageMetrics(REGISTRY)
