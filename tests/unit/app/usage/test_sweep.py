"""Rows whose process never came back are closed from the engine's journal."""

import pytest
from sqlalchemy import func, select

from app.usage import repository
from app.usage.models import UsageRecord
from app.usage.sweep import close_expired
from engine.types import JournalEntry
from tests.fake_engine import FakeEngine
from tests.serving import install_engines
from tests.unit.app.usage.conftest import ENGINE, opening

LEASE_S = 900


@pytest.fixture
def engine(platform) -> FakeEngine:
    fake = FakeEngine()
    install_engines(platform, {ENGINE: fake})
    return fake


def journalled(platform, request_id, *, tokens=7, finish="stop", age_s=3600):
    wall_ms = int((platform.clock.now().timestamp() - age_s) * 1000)
    return JournalEntry(request_id, 10, tokens, finish, wall_ms)


async def row(platform, request_id):
    async with platform.db.reading() as session:
        return await repository.get(session, request_id)


class TestCloseExpired:
    async def test_a_live_lease_is_left_alone(self, platform, ledger, engine):
        await ledger.open(opening("req_1"))
        platform.clock.advance(seconds=LEASE_S - 1)
        assert await close_expired(platform) == 0
        assert (await row(platform, "req_1")).status == "open"

    @pytest.mark.parametrize(
        ("finish", "status", "code"),
        [
            ("stop", "completed", None),
            ("length", "completed", None),
            ("cancelled", "cancelled", "api_lost"),
            ("error", "failed", "api_lost"),
            (None, "failed", "api_lost"),
        ],
    )
    async def test_the_journal_says_how_it_ended(
        self, platform, ledger, engine, acknowledged, finish, status, code
    ):
        await ledger.open(opening("req_1"))
        platform.clock.advance(seconds=LEASE_S + 1)
        engine.entries["req_1"] = journalled(platform, "req_1", finish=finish)
        assert await close_expired(platform) == 1
        found = await row(platform, "req_1")
        assert (found.status, found.error_code, found.closed_by) == (status, code, "sweep")
        assert (found.prompt_tokens, found.completion_tokens) == (10, 7)
        assert acknowledged == ["req_1"]

    async def test_what_the_engine_never_saw_costs_nothing(self, platform, ledger, engine):
        await ledger.open(opening("req_1"))
        platform.clock.advance(seconds=LEASE_S + 1)
        assert await close_expired(platform) == 1
        found = await row(platform, "req_1")
        assert (found.status, found.error_code) == ("failed", "never_reached_engine")
        assert (found.prompt_tokens, found.completion_tokens) == (0, 0)

    async def test_a_request_that_still_generates_waits(self, platform, ledger, engine):
        await ledger.open(opening("req_1"))
        platform.clock.advance(seconds=LEASE_S + 1)
        engine.entries["req_1"] = journalled(platform, "req_1", finish=None, age_s=5)
        assert await close_expired(platform) == 0
        platform.clock.advance(seconds=120)
        assert await close_expired(platform) == 1

    async def test_an_engine_that_is_away_is_waited_for_one_day(self, platform, ledger, engine):
        await ledger.open(opening("req_1"))
        platform.clock.advance(seconds=LEASE_S + 1)
        engine.alive = False
        assert await close_expired(platform) == 0
        platform.clock.advance(seconds=25 * 3600)
        assert await close_expired(platform) == 1
        assert (await row(platform, "req_1")).error_code == "engine_lost"

    async def test_the_spool_is_believed_before_the_journal(self, platform, ledger, engine, final):
        await ledger.open(opening("req_1"))
        engine.entries["req_1"] = journalled(platform, "req_1", tokens=9)
        ledger._spool.put(final("req_1", completion_tokens=4))
        platform.clock.advance(seconds=LEASE_S + 1)
        assert await close_expired(platform) == 1
        found = await row(platform, "req_1")
        assert (found.completion_tokens, found.closed_by) == (4, "spool")

    async def test_sweeping_twice_closes_once(self, platform, ledger, engine):
        for index in range(12):
            await ledger.open(opening(f"req_{index}"))
        platform.clock.advance(seconds=LEASE_S + 1)
        assert await close_expired(platform) == 12
        assert await close_expired(platform) == 0
        async with platform.db.reading() as session:
            assert await repository.month_used(session, "ten_1", "2026-03") == (0, 0)
            open_rows = select(func.count()).where(UsageRecord.status == "open")
            assert await session.scalar(open_rows) == 0
