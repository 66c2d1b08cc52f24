"""Every metric that /metrics can show, with its labels: documents and dashboards are held to it."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from app.engines.metrics import EngineCollector
from app.inference.engines import Engine
from app.metrics import BROKEN_STREAMS, HTTP_REQUESTS, HTTP_SECONDS, REFUSALS, REGISTRY
from app.usage import swept
from app.usage.entries import FinalEntry
from app.usage.metrics import UsageMetrics
from app.webhooks import metrics as webhooks
from app.webhooks.repository import Waiting
from engine.types import StepCounts, TenantAttainment, TenantResidency
from tests.fake_engine import FakeEngine

ENTRY = FinalEntry(
    request_id="req_1",
    engine="ipc://e",
    status="completed",
    prompt_tokens=4,
    cached_tokens=1,
    completion_tokens=5,
    overshoot_tokens=2,
    finish_reasons=["stop"],
    closed_at=datetime(2026, 3, 14, tzinfo=UTC),
    queue_ms=1.0,
    adapter_wait_ms=2.0,
    ttft_ms=5.0,
    total_ms=50.0,
)


NOON = datetime(2026, 3, 14, 12, tzinfo=UTC)


class Shown(Collector):
    """Families as they are."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


async def asked_engine(fake: FakeEngine, address: str = "ipc://e") -> Engine:
    """An engine as the router has it after a poll."""
    status = replace(
        await fake.status(),
        step_counts=StepCounts(buckets=[1] * 13, ms=20.0),
        resident={"ten_1": TenantResidency(1, 1, None, 0)},
        attainment={"ten_1": TenantAttainment(1, 0, 1, 0, 0, 1.0)},
    )
    return Engine(address, fake, description=fake.description, status=status)


async def families() -> dict[str, tuple[str, set[str]]]:
    """Family name as documents write it -> (its type, its labels), of one request of each kind."""
    registry = CollectorRegistry()
    usage = UsageMetrics(registry)
    usage.closed([ENTRY])
    usage.attributed([("ten_1", "adp_1", ENTRY)])
    engine = await asked_engine(FakeEngine())
    registry.register(EngineCollector(lambda: [engine]))
    for shown in (
        swept.families({(swept.REQUESTS, "failed"): 1, (swept.TOKENS, "prompt"): 1,
                        (swept.ENGINE_US, "decode"): 1,
                        (swept.TENANT_REQUESTS + "failed", "ten_1"): 1,
                        (swept.TENANT_TOKENS + "prompt", "ten_1"): 1}),
        webhooks.families(
            webhooks.Figures({(webhooks.ATTEMPTS, "delivered"): 1}, Waiting(0, None, None), NOON)
        ),
    ):  # fmt: skip
        registry.register(Shown(list(shown)))
    HTTP_REQUESTS.labels("GET", "/healthz", "200").inc()
    HTTP_SECONDS.labels("/healthz").observe(0.1)
    REFUSALS.labels("example").inc()
    BROKEN_STREAMS.labels("example").inc()
    text = generate_latest(registry).decode() + generate_latest(REGISTRY).decode()
    found: dict[str, tuple[str, set[str]]] = {}
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        kind, known = found.get(name, (family.type, set()))
        found[name] = (kind, known | labels)
    return found
