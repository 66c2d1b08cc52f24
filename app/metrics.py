"""Prometheus metrics of an api process. Other domains add theirs to REGISTRY.

Labels are bounded: routes are templates, tenants and adapters never come from a request's text.
"""

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the number of series and nobody reads them
REGISTRY = CollectorRegistry()

HTTP_REQUESTS = Counter(
    "loramux_http_requests",
    "Requests answered, by route and status.",
    ["method", "route", "status"],
    registry=REGISTRY,
)
HTTP_SECONDS = Histogram(
    "loramux_http_request_seconds",
    "Time until a response was sent in full, by route.",
    ["route"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
    registry=REGISTRY,
)
HTTP_OPEN = Gauge("loramux_http_open_requests", "Requests being answered.", registry=REGISTRY)
REFUSALS = Counter(
    "loramux_refusals",
    "Requests refused, by error code.",
    ["code"],
    registry=REGISTRY,
)
BROKEN_STREAMS = Counter(
    "loramux_broken_streams",
    "Streams that ended with an error frame after they had begun, by error code.",
    ["code"],
    registry=REGISTRY,
)


def render() -> bytes:
    """The text that /metrics answers."""
    return generate_latest(REGISTRY)
