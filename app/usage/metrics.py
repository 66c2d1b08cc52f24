"""Counters of the ledger, moved when a row is closed, so that they equal its sums."""

from collections.abc import Iterable
from functools import lru_cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from app.metrics import REGISTRY
from app.usage.entries import FinalEntry

LATENCY_BUCKETS_S = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2.5, 4, 8, 16, 32, 64)


class UsageMetrics:
    """Bounded labels: statuses and kinds of token, no tenants and no adapters."""

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

    def closed(self, entries: Iterable[FinalEntry]) -> None:
        for entry in entries:
            self._requests.labels(entry.status).inc()
            self._tokens.labels("prompt").inc(entry.prompt_tokens)
            self._tokens.labels("cached").inc(entry.cached_tokens)
            self._tokens.labels("completion").inc(entry.completion_tokens)
            self._tokens.labels("overshoot").inc(entry.overshoot_tokens)
            self._engine.labels("prefill").inc(entry.prefill_us / 1e6)
            self._engine.labels("decode").inc(entry.decode_us / 1e6)
            self._adapter.inc(entry.adapter_byte_s)
            if entry.ttft_ms is not None:
                self._ttft.observe(entry.ttft_ms / 1000.0)

    def running(self, count: int) -> None:
        self._open.set(count)

    def spooled(self, count: int) -> None:
        self._spooled.set(count)


@lru_cache(maxsize=1)
def usage_metrics() -> UsageMetrics:
    """This process's counters, which /metrics shows."""
    return UsageMetrics(REGISTRY)
