"""The ledger, its sums, the report and the metrics tell one story."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from sqlalchemy import select, text

from app.errors import InvalidRequest
from app.usage.models import UsageDaily, UsageHourly, UsageRecord
from app.usage.report import breakdown, report
from app.usage.roll_up import roll_up
from app.usage.sums_repository import FIGURES
from tests.unit.app.usage.conftest import opening

SUMMED = FIGURES[3:]  # those that are columns of the ledger itself


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
        ledger.close_soon(
            final(
                name,
                status=status,
                completion_tokens=index,
                overshoot_tokens=index % 4,
                prefill_us=1000 + index,
                decode_us=7 * index,
                adapter_byte_s=0 if index % 2 else 10_000_000_000,
            )
        )
        platform.clock.advance(seconds=3600)
    await ledger.open(opening("req_open"))
    await ledger.drain()
    return platform


async def reported(platform, tenant_id="ten_1", **options):
    async with platform.db.reading() as session:
        return await report(session, tenant_id, now=platform.clock.now(), **options)


NAMES = (
    *("requests", "cancelled", "failed", "prompt_tokens", "cached_tokens", "completion_tokens"),
    *("overshoot_tokens", "prefill_ms", "decode_ms", "adapter_byte_seconds"),
)


def totals(buckets):
    return tuple(round(sum(getattr(bucket, name) for bucket in buckets), 6) for name in NAMES)


async def ledger_totals(platform, tenant_id="ten_1"):
    """The same figures, added up row by row."""
    async with platform.db.reading() as session:
        rows = (await session.scalars(select(UsageRecord))).all()
    closed = [r for r in rows if r.status != "open" and tenant_id in (None, r.tenant_id)]
    own = [sum(getattr(row, name) for row in closed) for name in SUMMED]
    own[4] /= 1000
    own[5] /= 1000
    counts = [sum(row.status == status for row in closed) for status in ("cancelled", "failed")]
    return (len(closed), *counts, *own)


def shares(lines):
    """What a breakdown tells of each line of a report."""
    return [
        (
            *(one.requests, one.failed, one.prompt_tokens, one.completion_tokens),
            round(
                one.engine_ms if hasattr(one, "engine_ms") else one.prefill_ms + one.decode_ms, 6
            ),
        )
        for one in lines
    ]


class TestReport:
    async def test_every_grouping_and_bucket_sums_to_the_ledger(self, busy):
        expected = await ledger_totals(busy)
        for bucket in ("all", "month", "day", "hour"):
            for group_by in ((), ("key",), ("adapter",), ("model",), ("key", "adapter", "model")):
                grouped = await reported(busy, group_by=group_by, bucket=bucket)
                assert totals(grouped.data) == expected, (bucket, group_by)
                keys = [
                    (entry.start, entry.key_id or "", entry.adapter_id or "", entry.model or "")
                    for entry in grouped.data
                ]
                assert all(one < other for one, other in pairwise(keys))
                if group_by and bucket != "hour":
                    assert len(keys) > len({entry.start for entry in grouped.data})

    async def test_a_breakdown_is_both_reports_from_one_reading(self, busy):
        """By bucket, and the groups with the most tokens, those first."""
        now = busy.clock.now()
        span = {"now": now, "start": now - timedelta(days=20)}
        for bucket in ("hour", "day", "month"):
            for group_by in ("key", "adapter", "model"):
                async with busy.db.reading() as session:
                    over_time, groups = await breakdown(
                        session, "ten_1", bucket=bucket, group_by=group_by, most=9, **span
                    )
                    _, largest = await breakdown(
                        session, "ten_1", bucket=bucket, group_by=group_by, most=1, **span
                    )
                start = span["start"]
                whole = (await reported(busy, bucket=bucket, start=start)).data
                assert [one.start for one in over_time] == [one.start for one in whole]
                assert shares(over_time) == shares(whole)
                every = (await reported(busy, bucket="all", group_by=group_by, start=start)).data
                every.sort(key=lambda entry: (-entry.total_tokens, entry.group or ""))
                assert [entry.group for entry in groups] == [entry.group or "" for entry in every]
                assert shares(groups) == shares(every)
                assert largest == groups[:1]

    async def test_grouped_by_key_the_sums_are_the_tenants_total(self, busy):
        grouped = await reported(busy, group_by="key")
        assert totals(grouped.data) == totals((await reported(busy)).data)
        assert {entry.group for entry in grouped.data} == {"key_0", "key_1", "key_2", None}

    async def test_operators_see_all_tenants_and_each(self, busy):
        grouped = await reported(busy, None, group_by=("tenant",))
        assert totals(grouped.data) == await ledger_totals(busy, None)
        assert {entry.tenant_id for entry in grouped.data} == {"ten_1", "ten_2"}

    async def test_filters_leave_the_rest_out(self, busy):
        one = await reported(busy, key_id="key_1")
        others = [await reported(busy, key_id=key) for key in ("key_0", "key_2", "")]
        counted = [totals(found.data)[0] for found in (one, *others)]
        assert sum(counted) == totals((await reported(busy)).data)[0]
        assert all(counted)
        base = await reported(busy, model="base", adapter_id="adp_1")
        assert base.data == []

    async def test_by_minute_the_ledger_itself_is_read(self, busy):
        start = datetime(2026, 3, 14, 12, 0, tzinfo=UTC)
        found = await reported(
            busy, start=start, end=start + timedelta(hours=6), bucket="minute", group_by="model"
        )
        assert [entry.start for entry in found.data] == [
            start + timedelta(hours=index) for index in range(1, 6) if index % 5
        ]

    async def test_days_begin_at_midnight_utc(self, busy):
        days = [entry.start for entry in (await reported(busy)).data]
        assert days == [datetime(2026, 3, 14, tzinfo=UTC), datetime(2026, 3, 15, tzinfo=UTC)]
        months = [entry.start for entry in (await reported(busy, bucket="month")).data]
        assert months == [datetime(2026, 3, 1, tzinfo=UTC)]

    @pytest.mark.parametrize("minute", [0, 17])
    async def test_the_span_is_half_open_wherever_it_is_cut(self, busy, minute):
        start = datetime(2026, 3, 15, 3, minute, tzinfo=UTC)
        late = await reported(busy, start=start)
        early = await reported(busy, end=start)
        assert totals(late.data)[0] > 0
        assert totals(late.data + early.data) == await ledger_totals(busy)

    async def test_pages_follow_one_another_without_a_gap(self, busy):
        whole = (await reported(busy, bucket="hour", group_by=("key", "model"))).data
        after, paged = None, []
        while True:
            page = await reported(
                busy, bucket="hour", group_by=("key", "model"), after=after, limit=5
            )
            paged += page.data
            after = page.next
            assert page.has_more == (after is not None)
            if after is None:
                break
        assert paged == whole
        assert len(whole) > 10

    @pytest.mark.parametrize(
        ("options", "param"),
        [
            ({"start": "now", "end": "now"}, "start"),
            ({"start": timedelta(days=100), "bucket": "hour"}, "start"),
            ({"start": timedelta(hours=40), "bucket": "minute"}, "start"),
            ({"start": datetime(1, 1, 1)}, "start"),
            ({"end": datetime(9999, 12, 31, 23, 59)}, "end"),
            ({"after": "bm8="}, "after"),
            ({"after": "Ww=="}, "after"),
            ({"after": "WzEsMl0="}, "after"),
        ],
    )
    async def test_what_makes_no_sense_is_refused_by_name(self, busy, options, param):
        now = busy.clock.now()
        for name, value in options.items():
            if isinstance(value, timedelta):
                options = {**options, name: now - value}
            elif value == "now":
                options = {**options, name: now}
        with pytest.raises(InvalidRequest) as refusal:
            await reported(busy, **options)
        assert refusal.value.param == param


class TestSums:
    @pytest.fixture
    def database_url(self, any_database_url):
        return any_database_url

    async def test_hours_and_days_equal_the_ledger_as_soon_as_rows_close(self, busy):
        assert await roll_up(busy.db, busy.clock) == 0
        for table in (UsageHourly, UsageDaily):
            async with busy.db.reading() as session:
                rows = (await session.scalars(select(table))).all()
            kept = [sum(getattr(row, name) for row in rows) for name in FIGURES]
            kept[7] /= 1000
            kept[8] /= 1000
            assert tuple(kept) == await ledger_totals(busy, None)

    async def test_a_late_close_reaches_the_day_on_which_it_began(self, busy, ledger, final):
        began = busy.clock.now()
        busy.clock.advance(seconds=86_400)
        ledger.close_soon(final("req_open", completion_tokens=1000))
        await ledger.drain()
        found = await reported(busy)
        (last,) = [entry for entry in found.data if entry.completion_tokens >= 1000]
        assert last.start.date() == began.date()
        assert await roll_up(busy.db, busy.clock) == 0

    async def test_sums_that_were_lost_are_written_anew_from_the_ledger(self, busy):
        whole = totals((await reported(busy)).data)
        async with busy.db.transaction() as session:
            await session.execute(text("DELETE FROM usage_hourly WHERE model = 'base'"))
            await session.execute(text("UPDATE usage_daily SET decode_us = decode_us + 1"))
        assert totals((await reported(busy)).data) != whole
        assert await roll_up(busy.db, busy.clock) == 2
        assert totals((await reported(busy)).data) == whole
        assert totals((await reported(busy, bucket="hour")).data) == whole
        assert await roll_up(busy.db, busy.clock) == 0


class TestMetrics:
    async def test_ledger_sums_and_counters_are_equal_after_the_drain(self, busy, registry):
        everything = await reported(busy, None)
        assert totals(everything.data) == await ledger_totals(busy, None)
        figures = dict(zip(NAMES, totals(everything.data), strict=True))

        def value(name, **labels):
            return registry.get_sample_value(name, labels)

        ended = {status: value("loramux_requests_total", status=status) for status in STATUSES}
        assert sum(ended.values()) == figures["requests"]
        assert (ended["cancelled"], ended["failed"]) == (figures["cancelled"], figures["failed"])
        for kind in ("prompt", "cached", "completion", "overshoot"):
            assert value("loramux_tokens_total", kind=kind) == figures[f"{kind}_tokens"]
        for phase in ("prefill", "decode"):
            counted = value("loramux_engine_seconds_total", phase=phase)
            assert counted == pytest.approx(figures[f"{phase}_ms"] / 1000)
        counted = value("loramux_adapter_byte_seconds_total")
        assert counted == figures["adapter_byte_seconds"]
        assert value("loramux_open_requests") == 1


STATUSES = ("completed", "cancelled", "failed")
