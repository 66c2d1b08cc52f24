"""What /metrics says of closed rows: every breakdown adds up to the total, and to the ledger."""

from collections import Counter
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import func, select
from sqlalchemy import text as text_of

from app.bounded_labels import OTHER
from app.usage import swept
from app.usage.metrics import UsageMetrics
from app.usage.models import UsageRecord
from app.usage.service import Ledger
from app.usage.spool import Spool
from app.usage.sweep import close_expired
from engine.types import JournalEntry
from tests.exported_metrics import ENTRY
from tests.fake_engine import FakeEngine
from tests.serving import install_engines
from tests.unit.app.usage.conftest import ENGINE, opening


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


async def test_what_workers_close_is_shown_beside_it_by_every_api(
    client, platform, ledger, final, registry
):
    """An api closes some rows, a worker what another api left: together they are the ledger."""
    worker = workers_ledger(platform, CollectorRegistry())
    fake = FakeEngine()
    install_engines(platform, {ENGINE: fake})
    for index in range(6):
        await ledger.open(opening(f"req_{index}"))
    for index in range(2):
        ledger.close_soon(final(f"req_{index}", completion_tokens=index, prefill_us=500_000))
    await ledger.drain()
    for index, finish in ((2, "stop"), (3, "cancelled"), (4, None)):
        wall_ms = int(platform.clock.now().timestamp() * 1000)
        fake.entries[f"req_{index}"] = JournalEntry(f"req_{index}", 10, index, finish, wall_ms)
    platform.clock.advance(seconds=1000)
    platform.ledger = worker
    assert await close_expired(platform) == 4
    text = (await client.get("/metrics")).text
    shown = CollectorRegistry()
    shown.collect = lambda: text_string_to_metric_families(text)
    requests = Counter(by(registry, "loramux_requests_total", "status"))
    requests.update(by(shown, "loramux_swept_requests_total", "status"))
    tokens = Counter(by(registry, "loramux_tokens_total", "kind"))
    tokens.update(by(shown, "loramux_swept_tokens_total", "kind"))
    columns = [UsageRecord.status, func.count(), func.sum(UsageRecord.prompt_tokens)]
    columns.append(func.sum(UsageRecord.completion_tokens))
    async with platform.db.reading() as session:
        rows = (await session.execute(select(*columns).group_by(UsageRecord.status))).all()
    assert requests == {row[0]: row[1] for row in rows}
    assert requests == {"completed": 3, "cancelled": 1, "failed": 2}
    assert tokens["prompt"] == sum(row[2] for row in rows)
    assert tokens["completion"] == sum(row[3] for row in rows) == 10


async def test_swept_rows_are_told_by_tenant_and_the_rest_together(platform):
    """In two transactions: a place that is given stays, and each family adds up to the totals."""
    closed = [(f"ten_{i % 5}", replace(ENTRY, completion_tokens=i)) for i in range(20)]
    async with platform.db.transaction() as session:
        await session.run_sync(lambda s: swept.count(s.connection(), closed[:2], places=3))
    async with platform.db.transaction() as session:
        await session.run_sync(lambda s: swept.count(s.connection(), closed[2:][::-1], places=3))
    async with platform.db.reading() as session:
        found = await swept.read(session)
    shown = CollectorRegistry()
    shown.collect = lambda: swept.families(found)
    tenants = by(shown, "loramux_swept_tenant_requests_total", "tenant")
    assert tenants == {"ten_0": 4, "ten_1": 4, "ten_4": 4, OTHER: 8}
    for what, label in (("requests", "status"), ("tokens", "kind")):
        total = by(shown, f"loramux_swept_{what}_total", label)
        assert by(shown, f"loramux_swept_tenant_{what}_total", label) == total
        assert sum(total.values()) > 0


async def test_figures_from_sql_are_left_out_while_the_database_is_away(client, platform):
    assert "loramux_swept_adapter_byte_seconds_total 0.0" in (await client.get("/metrics")).text
    async with platform.db.transaction() as session:
        await session.execute(text_of("ALTER TABLE tallies RENAME TO tallies_away"))
    try:
        answer = await client.get("/metrics")
    finally:
        async with platform.db.transaction() as session:
            await session.execute(text_of("ALTER TABLE tallies_away RENAME TO tallies"))
    assert answer.status_code == 200
    assert "loramux_swept" not in answer.text
    assert "loramux_http_requests_total" in answer.text


def workers_ledger(platform, registry):
    """A worker's: nobody reads its process's metrics."""

    async def acknowledge(_engine, _request_ids):
        return None

    return Ledger(
        platform.db,
        platform.clock,
        Spool(platform.settings.data_dir / "spool"),
        UsageMetrics(registry),
        lease_s=900,
        acknowledge=acknowledge,
        scraped=False,
    )
