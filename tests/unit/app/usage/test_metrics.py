"""What /metrics says of closed rows: every breakdown adds up to the total, and to the ledger."""

from collections import Counter
from dataclasses import replace

import pytest
from sqlalchemy import func, select

from app.bounded_labels import OTHER
from app.usage.metrics import UsageMetrics
from app.usage.models import UsageRecord
from tests.exported_metrics import ENTRY
from tests.unit.app.usage.conftest import opening


def samples(registry, name):
    """(labels, value) of every sample of that name."""
    return [
        (sample.labels, sample.value)
        for family in registry.collect()
        for sample in family.samples
        if sample.name == name
    ]


def by(registry, name, label):
    summed = Counter()
    for labels, value in samples(registry, name):
        summed[labels[label]] += value
    return {key: value for key, value in summed.items() if value}


@pytest.fixture
def metrics(registry):
    return UsageMetrics(registry)


def close(metrics, tenant, adapter, **changes):
    entry = replace(ENTRY, **changes)
    metrics.closed([entry])
    metrics.attributed([(tenant, adapter, entry)])


class TestSums:
    @pytest.fixture
    def busy(self, metrics):
        metrics.tenants.places, metrics.adapters.places = 4, 3
        for index in range(300):
            close(
                metrics,
                f"ten_{index % 11}",
                f"adp_{index % 13}" if index % 4 else None,
                status=("completed", "cancelled", "failed")[index % 3],
                completion_tokens=index,
                prompt_tokens=3,
            )

    @pytest.mark.parametrize("owner", ["tenant", "adapter"])
    def test_every_owners_tokens_and_requests_add_up_to_the_totals(self, busy, registry, owner):
        for what, label in (("tokens", "kind"), ("requests", "status")):
            total = by(registry, f"loramux_{what}_total", label)
            assert by(registry, f"loramux_{owner}_{what}_total", label) == total
            assert sum(total.values()) > 0

    def test_series_are_bounded_and_the_rest_is_other(self, busy, registry):
        tenants = by(registry, "loramux_tenant_requests_total", "tenant")
        adapters = by(registry, "loramux_adapter_requests_total", "adapter")
        assert OTHER in tenants
        assert len(tenants) <= 4 + 1
        assert len(adapters) <= 3 + 2  # other, none


class TestTimes:
    def test_a_cold_start_is_one_that_waited_for_its_adapter(self, metrics, registry):
        close(metrics, "t", "a", adapter_wait_ms=7.0)
        close(metrics, "t", "a", adapter_wait_ms=0.0)
        close(metrics, "t", None, adapter_wait_ms=0.0)
        assert by(registry, "loramux_starts_total", "start") == {"cold": 1, "warm": 1, "base": 1}
        assert samples(registry, "loramux_adapter_wait_seconds_sum")[0][1] == pytest.approx(0.007)

    def test_time_per_output_token_leaves_the_first_one_out(self, metrics, registry):
        close(metrics, "t", None, ttft_ms=100.0, total_ms=500.0, completion_tokens=5)
        close(metrics, "t", None, ttft_ms=100.0, total_ms=100.0, completion_tokens=1)
        assert samples(registry, "loramux_time_per_output_token_seconds_count")[0][1] == 1
        assert samples(registry, "loramux_time_per_output_token_seconds_sum")[0][
            1
        ] == pytest.approx(0.1)

    def test_a_request_that_never_reached_the_engine_has_no_waits(self, metrics, registry):
        close(metrics, "t", "a", queue_ms=None, adapter_wait_ms=None, ttft_ms=None)
        assert samples(registry, "loramux_queue_wait_seconds_count")[0][1] == 0
        assert by(registry, "loramux_starts_total", "start") == {}


async def test_the_counters_equal_the_ledger(ledger, platform, final, registry):
    for index in range(12):
        await ledger.open(opening(f"req_{index}", adapter_id="adp_1" if index % 2 else None))
        ledger.close_soon(final(f"req_{index}", completion_tokens=index))
    await ledger.drain()
    sums = select(func.sum(UsageRecord.prompt_tokens), func.sum(UsageRecord.completion_tokens))
    async with platform.db.reading() as session:
        row = (await session.execute(sums)).one()
    counted = by(registry, "loramux_tenant_tokens_total", "kind")
    assert [counted["prompt"], counted["completion"]] == list(row)
    assert by(registry, "loramux_adapter_requests_total", "adapter") == {"adp_1": 6, "none": 6}
