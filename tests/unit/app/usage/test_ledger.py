"""One row per admitted request: opened before, closed once, whatever is away meanwhile."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import func, select

from app.errors import Conflict, Overloaded, RateLimited
from app.usage import repository
from app.usage.entries import month_of
from app.usage.models import UsageMonth, UsageRecord
from app.usage.service import MonthLeft, month_standing
from tests.unit.app.usage.conftest import bring_database_back, opening, take_database_away


async def row(platform, request_id):
    async with platform.db.reading() as session:
        return await repository.get(session, request_id)


class TestOpening:
    async def test_the_row_is_committed_open_with_a_lease(self, ledger, platform):
        await ledger.open(opening("req_1"))
        found = await row(platform, "req_1")
        assert found.status == "open"
        assert (found.lease_until - platform.clock.now()).total_seconds() == 900
        assert ledger.running == {"req_1"}

    async def test_a_second_request_of_the_same_id_adds_no_row(self, ledger, platform):
        await ledger.open(opening("req_1"))
        with pytest.raises(Conflict) as refusal:
            await ledger.open(opening("req_1"))
        assert refusal.value.code == "duplicate_request_id"
        async with platform.db.reading() as session:
            assert await session.scalar(select(func.count()).select_from(UsageRecord)) == 1
            assert await repository.month_used(session, "ten_1", "2026-03") == (0, 100)

    async def test_without_the_database_no_request_is_admitted(self, ledger, platform):
        await take_database_away(platform)
        with pytest.raises(Overloaded) as refusal:
            await ledger.open(opening("req_1"))
        assert refusal.value.code == "ledger_unavailable"
        assert int(refusal.value.headers()["Retry-After"]) >= 1
        assert ledger.running == frozenset()


class TestClosing:
    async def test_the_final_counts_are_in_the_row(self, ledger, platform, final, acknowledged):
        await ledger.open(opening("req_1"))
        ledger.close_soon(final("req_1", overshoot_tokens=3))
        await ledger.drain()
        found = await row(platform, "req_1")
        assert (found.status, found.closed_by) == ("completed", "api")
        assert (found.prompt_tokens, found.completion_tokens, found.overshoot_tokens) == (10, 5, 3)
        assert found.finish_reasons == ["stop"]
        assert acknowledged == ["req_1"]
        assert ledger.running == frozenset()

    @pytest.mark.parametrize("together", [True, False])
    async def test_a_row_closes_once(self, ledger, platform, final, together):
        await ledger.open(opening("req_1"))
        ledger.close_soon(final("req_1"))
        if not together:
            await ledger.drain()
        ledger.close_soon(final("req_1", completion_tokens=999))
        await ledger.drain()
        assert (await row(platform, "req_1")).completion_tokens == 5
        async with platform.db.reading() as session:
            assert await repository.month_used(session, "ten_1", "2026-03") == (15, 0)

    async def test_an_explicit_zero_stays_zero(self, ledger, platform, final):
        await ledger.open(opening("req_1"))
        ledger.close_soon(final("req_1", status="cancelled", completion_tokens=0))
        await ledger.drain()
        assert (await row(platform, "req_1")).completion_tokens == 0


class TestUnforeseen:
    async def test_a_fault_after_the_commit_neither_stops_the_writer_nor_loses_a_row(
        self, ledger, platform, final, monkeypatch
    ):
        async def explode(engine, request_ids):
            raise ZeroDivisionError

        for name in ("req_1", "req_2"):
            await ledger.open(opening(name))
        monkeypatch.setattr(ledger, "_acknowledge", explode)
        ledger.close_soon(final("req_1"))
        await ledger.drain()
        ledger.close_soon(final("req_2"))
        await ledger.drain()
        assert [(await row(platform, name)).status for name in ("req_1", "req_2")] == [
            "completed",
            "completed",
        ]


class TestDatabaseAway:
    async def test_final_rows_are_spooled_and_replayed(self, ledger, platform, final, acknowledged):
        for index in range(3):
            await ledger.open(opening(f"req_{index}"))
        await take_database_away(platform)
        for index in range(3):
            ledger.close_soon(final(f"req_{index}", completion_tokens=index))
        await ledger.drain()
        spool = platform.settings.data_dir / "spool"
        assert len(list(spool.glob("*.json"))) == 3
        assert acknowledged == []  # the engine's journal is still the second copy
        await ledger.tick()
        assert len(list(spool.glob("*.json"))) == 3

        await bring_database_back(platform)
        await ledger.tick()
        for index in range(3):
            found = await row(platform, f"req_{index}")
            assert (found.completion_tokens, found.closed_by) == (index, "spool")
        assert list(spool.iterdir()) == []
        assert sorted(acknowledged) == ["req_0", "req_1", "req_2"]

    async def test_a_damaged_spool_file_is_set_aside_and_holds_up_nothing(
        self, ledger, platform, final
    ):
        await ledger.open(opening("req_1"))
        await take_database_away(platform)
        ledger.close_soon(final("req_1"))
        await ledger.drain()
        spool = platform.settings.data_dir / "spool"
        (spool / "req_0.json").write_bytes(b'{"request_id": "req_0", "eng')
        await bring_database_back(platform)
        assert await ledger.replay() == 1
        assert [path.name for path in spool.iterdir()] == ["req_0.bad"]

    async def test_spooled_files_are_for_the_owner_alone(self, ledger, platform, final):
        await take_database_away(platform)
        ledger.close_soon(final("req_1"))
        await ledger.drain()
        spool = platform.settings.data_dir / "spool"
        assert spool.stat().st_mode & 0o777 == 0o700
        assert (spool / "req_1.json").stat().st_mode & 0o777 == 0o600


class TestLeases:
    async def test_a_running_requests_lease_is_renewed(self, ledger, platform):
        await ledger.open(opening("req_1"))
        platform.clock.advance(seconds=600)
        await ledger.tick()
        found = await row(platform, "req_1")
        assert (found.lease_until - platform.clock.now()).total_seconds() == 900

    async def test_an_ended_requests_lease_is_not(self, ledger, platform, final):
        await ledger.open(opening("req_1"))
        await take_database_away(platform)
        ledger.close_soon(final("req_1"))
        await ledger.drain()
        await bring_database_back(platform)
        assert ledger.running == frozenset()


class TestMonths:
    @pytest.fixture
    def database_url(self, any_database_url):
        return any_database_url

    async def test_a_spent_month_refuses_until_the_next_one_begins(self, ledger, platform, final):
        month = {"monthly": {"ten_1": 120}, "key_id": None}
        await ledger.open(opening("req_1", **month))
        with pytest.raises(RateLimited) as refusal:
            await ledger.open(opening("req_2", **month))
        assert refusal.value.code == "monthly_tokens_exceeded"
        ledger.close_soon(final("req_1", prompt_tokens=60, completion_tokens=40))
        await ledger.drain()
        wait_s = int(refusal.value.headers()["Retry-After"])
        platform.clock.advance(seconds=wait_s)
        assert platform.clock.now().replace(microsecond=0) == datetime(
            2026, 4, 1, 0, 0, 1, tzinfo=UTC
        )
        await ledger.open(opening("req_2", **month))
        async with platform.db.reading() as session:
            assert await repository.month_used(session, "ten_1", "2026-03") == (100, 0)
            assert await month_standing(session, "ten_1", platform.clock.now()) == (0, 100)

    @pytest.mark.parametrize(
        "end",
        [
            datetime(2026, 4, 1, tzinfo=UTC),  # clocks went forward in Europe two days before
            datetime(2026, 11, 1, tzinfo=UTC),  # and go back in America on this very day
            datetime(2027, 1, 1, tzinfo=UTC),
            datetime(2028, 3, 1, tzinfo=UTC),  # after a leap day
        ],
    )
    async def test_the_budget_begins_anew_at_midnight_utc_and_history_is_kept(
        self, ledger, platform, final, end
    ):
        month = {"monthly": {"ten_1": 100}, "key_id": None}
        platform.clock.at = end - timedelta(seconds=1)
        spent = month_of(platform.clock.now())
        await ledger.open(opening("req_1", **month))
        with pytest.raises(RateLimited) as refusal:
            await ledger.open(opening("req_2", **month))
        assert refusal.value.headers()["Retry-After"] == "2"
        platform.clock.advance(seconds=1)
        ledger.close_soon(final("req_1", prompt_tokens=60, completion_tokens=40))
        await ledger.drain()
        await ledger.open(opening("req_2", **month))
        async with platform.db.reading() as session:
            assert await repository.month_used(session, "ten_1", spent) == (100, 0)
            assert await month_standing(session, "ten_1", platform.clock.now()) == (0, 100)

    async def test_unused_reservation_can_be_spent_by_the_next_request(self, ledger, final):
        month = {"monthly": {"ten_1": 120}, "key_id": None}
        await ledger.open(opening("req_1", **month))
        ledger.close_soon(final("req_1"))
        await ledger.drain()
        await ledger.open(opening("req_2", **month))

    async def test_what_an_ended_call_gives_back_is_there_for_the_next_at_once(self, ledger, final):
        month = {"monthly": {"ten_1": 120}, "key_id": None}
        await ledger.open(opening("req_1", **month))
        ledger.close_soon(final("req_1"))
        await ledger.open(opening("req_2", **month))

    async def test_a_spent_month_refuses_its_own_calls_alone(self, ledger, platform):
        spent = {"key_id": None, "tenant_id": "ten_2", "monthly": {"key_2": 900, "ten_2": 150}}
        answers = await asyncio.gather(
            ledger.open(opening("req_1")),
            *(ledger.open(opening(f"req_{i}", **spent)) for i in (2, 3)),
            ledger.open(opening("req_4")),
            return_exceptions=True,
        )
        assert [type(answer) for answer in answers] == [
            *(type(None), MonthLeft, RateLimited, type(None))
        ]
        async with platform.db.reading() as session:
            assert await session.scalar(select(func.count()).select_from(UsageRecord)) == 3
            for owner, reserved in (("ten_1", 200), ("ten_2", 100), ("key_2", 100)):
                assert await repository.month_used(session, owner, "2026-03") == (0, reserved)

    async def test_fifty_at_once_spend_no_more_than_the_month_allows(self, ledger, platform):
        month = {"monthly": {"ten_1": 450}, "key_id": None}
        answers = await asyncio.gather(
            *(ledger.open(opening(f"req_{i}", **month)) for i in range(50)),
            return_exceptions=True,
        )
        refusals = [answer for answer in answers if isinstance(answer, RateLimited)]
        admitted = [answer for answer in answers if isinstance(answer, MonthLeft)]
        assert (len(refusals), len(admitted)) == (46, 4)
        assert min(left.tokens for left in admitted) == 50
        async with platform.db.reading() as session:
            assert await repository.month_used(session, "ten_1", "2026-03") == (0, 400)

    async def test_a_refused_request_leaves_no_row_and_no_reservation(self, ledger, platform):
        with pytest.raises(RateLimited):
            await ledger.open(opening("req_1", monthly={"key_1": 50, "ten_1": None}))
        async with platform.db.reading() as session:
            assert await session.scalar(select(func.count()).select_from(UsageRecord)) == 0
            assert await session.scalar(select(func.count()).select_from(UsageMonth)) == 0

    async def test_months_equal_the_sums_of_the_ledger(self, ledger, platform, final):
        for index in range(20):
            await ledger.open(opening(f"req_{index}", key_id=f"key_{index % 3}"))
            ledger.close_soon(final(f"req_{index}", completion_tokens=index))
        await ledger.drain()
        async with platform.db.reading() as session:
            total = await session.scalar(
                select(
                    func.sum(UsageRecord.prompt_tokens) + func.sum(UsageRecord.completion_tokens)
                )
            )
            assert await repository.month_used(session, "ten_1", "2026-03") == (total, 0)
