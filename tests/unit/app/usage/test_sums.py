"""The ledger, the roll-up, the report and the metrics tell one story."""

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import func, select

from app.errors import InvalidRequest
from app.usage.models import UsageDaily
from app.usage.report import report
from app.usage.roll_up import roll_up
from tests.unit.app.usage.conftest import opening


@pytest.fixture
async def busy(ledger, platform, final):
    """Thirty requests of two tenants, three keys and two models over two days, one still open."""
    for index in range(30):
        name = f"req_{index:02d}"
        await ledger.open(
            opening(
                name,
                tenant_id="ten_1" if index % 5 else "ten_2",
                key_id=f"key_{index % 3}" if index % 7 else None,
                adapter_id=None if index % 2 else "adp_1",
                model="base" if index % 2 else "support@v1",
            )
        )
        status = ("completed", "cancelled", "failed")[index % 3]
        ledger.close_soon(final(name, status=status, completion_tokens=index))
        platform.clock.advance(seconds=3600)
    await ledger.open(opening("req_open"))
    await ledger.drain()
    return platform


async def reported(platform, **options):
    async with platform.db.reading() as session:
        return await report(session, "ten_1", now=platform.clock.now(), **options)


def totals(buckets):
    names = ("requests", "cancelled", "failed", "prompt_tokens", "completion_tokens")
    return tuple(sum(getattr(bucket, name) for bucket in buckets) for name in names)


class TestReport:
    @pytest.mark.parametrize("group_by", ["key", "adapter", "model"])
    @pytest.mark.parametrize("bucket", ["day", "hour"])
    async def test_every_grouping_sums_to_the_tenants_total(self, busy, group_by, bucket):
        whole = await reported(busy)
        grouped = await reported(busy, group_by=group_by, bucket=bucket)
        assert totals(grouped.data) == totals(whole.data)
        assert totals(whole.data)[0] == 24
        assert len({entry.group for entry in grouped.data}) > 1

    async def test_days_begin_at_midnight_utc(self, busy):
        days = [entry.start for entry in (await reported(busy)).data]
        assert days == [datetime(2026, 3, 14, tzinfo=UTC), datetime(2026, 3, 15, tzinfo=UTC)]

    async def test_the_span_is_half_open(self, busy):
        start = datetime(2026, 3, 15, tzinfo=UTC)
        late = await reported(busy, start=start)
        early = await reported(busy, end=start)
        assert totals(late.data)[0] + totals(early.data)[0] == 24

    async def test_spans_that_make_no_sense_are_refused_by_name(self, busy):
        now = busy.clock.now()
        for options in (
            {"start": now, "end": now},
            {"start": now - timedelta(days=100), "bucket": "hour"},
        ):
            with pytest.raises(InvalidRequest) as refusal:
                await reported(busy, **options)
            assert refusal.value.param == "start"


class TestRollUp:
    @pytest.fixture
    def database_url(self, any_database_url):
        return any_database_url

    async def test_the_roll_up_equals_the_ledger(self, busy):
        assert await roll_up(busy.db, busy.clock, timedelta(days=7)) == 2
        whole = await reported(busy)
        async with busy.db.reading() as session:
            rolled = await session.execute(
                select(
                    func.sum(UsageDaily.requests),
                    func.sum(UsageDaily.cancelled),
                    func.sum(UsageDaily.failed),
                    func.sum(UsageDaily.prompt_tokens),
                    func.sum(UsageDaily.completion_tokens),
                ).where(UsageDaily.tenant_id == "ten_1")
            )
            assert tuple(int(value) for value in rolled.one()) == totals(whole.data)

    async def test_a_late_close_reaches_the_day_on_which_it_began(self, busy, ledger, final):
        await roll_up(busy.db, busy.clock, timedelta(days=7))
        busy.clock.advance(seconds=86_400)
        ledger.close_soon(final("req_open", completion_tokens=1000))
        await ledger.drain()
        assert await roll_up(busy.db, busy.clock) == 1
        async with busy.db.reading() as session:
            largest = await session.scalar(select(func.max(UsageDaily.completion_tokens)))
            assert largest >= 1000


class TestMetrics:
    async def test_counters_equal_the_ledger(self, busy, registry, ledger):
        async with busy.db.reading() as session:
            both = [
                await report(session, tenant, now=busy.clock.now()) for tenant in ("ten_1", "ten_2")
            ]
        buckets = [bucket for one in both for bucket in one.data]
        requests, cancelled, failed, prompt, completion = totals(buckets)

        def value(name, **labels):
            return registry.get_sample_value(name, labels)

        assert value("loramux_requests_total", status="cancelled") == cancelled
        assert value("loramux_requests_total", status="failed") == failed
        assert value("loramux_requests_total", status="completed") == requests - cancelled - failed
        assert value("loramux_tokens_total", kind="prompt") == prompt
        assert value("loramux_tokens_total", kind="completion") == completion
        assert value("loramux_open_requests") == 1
