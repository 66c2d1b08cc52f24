"""The unit of work: when it commits, when not, and who waits for whom."""

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime, timedelta, timezone

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from sqlalchemy import select, text
from sqlalchemy.exc import StatementError

from app.db import Database, after_commit, to_its_end
from app.deps import Session
from app.errors import Conflict
from app.main import create_app
from app.platform import Platform
from app.tenants import service as tenants
from app.tenants.models import Tenant
from tests.factories import make_tenant


@pytest.fixture
def database_url(any_database_url: str) -> str:
    return any_database_url


@pytest.fixture
def app(platform: Platform) -> FastAPI:
    app = create_app(platform=platform)

    async def create(session: Session, name: str) -> str:
        return (
            await tenants.create_tenant(session, name=name, now=platform.clock.now(), actor="tests")
        ).id

    @app.post("/v1/keep")
    async def keep(session: Session) -> StreamingResponse:
        await create(session, "kept")

        async def found() -> AsyncIterator[str]:
            async with platform.db.reading() as other:
                yield ",".join((await other.execute(select(Tenant.name))).scalars())

        return StreamingResponse(found())

    @app.post("/v1/refuse")
    async def refuse(session: Session) -> None:
        await create(session, "refused")
        raise Conflict("after the row was written")

    return app


async def names(platform: Platform) -> list[str]:
    async with platform.db.reading() as session:
        return list((await session.execute(select(Tenant.name))).scalars())


class TestARequest:
    async def test_commits_before_its_answer_is_sent(self, client: httpx.AsyncClient) -> None:
        assert (await client.post("/v1/keep")).text == "kept"

    async def test_that_is_refused_leaves_nothing(
        self, client: httpx.AsyncClient, platform: Platform
    ) -> None:
        assert (await client.post("/v1/refuse")).status_code == 409
        assert await names(platform) == []


class TestTransactions:
    async def test_writers_wait_for_each_other_instead_of_failing(self, platform: Platform) -> None:
        await asyncio.gather(*(make_tenant(platform, f"t{n}") for n in range(12)))
        assert len(await names(platform)) == 12

    async def test_who_reads_and_then_writes_loses_nobodys_change(self, platform: Platform) -> None:
        tenant = await make_tenant(platform, max_rank=1)

        async def increment() -> None:
            async with platform.db.transaction() as session:
                row = await tenants.find_tenant(session, tenant.id, lock=True)
                await asyncio.sleep(0.02)
                row.max_rank = (row.max_rank or 0) + 1

        await asyncio.gather(*(increment() for _ in range(5)))
        async with platform.db.reading() as session:
            assert (await tenants.find_tenant(session, tenant.id)).max_rank == 6

    async def test_a_reader_never_waits_for_a_writer(self, platform: Platform) -> None:
        await make_tenant(platform, "before")
        async with platform.db.transaction() as session:
            await tenants.create_tenant(
                session, name="during", now=platform.clock.now(), actor="tests"
            )
            async with asyncio.timeout(5):
                assert await names(platform) == ["before"]

    async def test_foreign_keys_hold(self, platform: Platform) -> None:
        from sqlalchemy.exc import IntegrityError

        with pytest.raises(IntegrityError):
            async with platform.db.transaction() as session:
                await session.execute(
                    text(
                        "INSERT INTO api_keys (id, tenant_id, role, name, public_id, secret_hash,"
                        " hash_version, last4, scopes, created_by, created_at) VALUES ('k',"
                        " 'ten_none', 'api_key', '', 'p', 'h', 1, '1234', '{}', 'x',"
                        " '2026-01-01 00:00:00')"
                    )
                )

    async def test_errors_do_not_show_what_a_caller_sent(self, platform: Platform) -> None:
        with pytest.raises(Exception, match="canary_column") as caught:
            async with platform.db.transaction() as session:
                await session.execute(
                    text("SELECT canary_column FROM tenants WHERE name = :name"),
                    {"name": "canary-value"},
                )
        assert "canary-value" not in str(caught.value)


class TestAfterCommit:
    async def test_runs_once_the_transaction_is_kept(self, platform: Platform) -> None:
        ran: list[list[str]] = []
        async with platform.db.transaction() as session:
            after_commit(session, lambda: ran.append([]))
            await session.execute(text("SELECT 1"))
            assert ran == []
        assert ran == [[]]

    async def test_never_runs_when_it_is_not(self, platform: Platform) -> None:
        ran: list[int] = []

        async def fails() -> None:
            async with platform.db.transaction() as session:
                after_commit(session, lambda: ran.append(1))
                await session.execute(text("SELECT 1"))
                raise RuntimeError("no")

        with pytest.raises(RuntimeError):
            await fails()
        assert ran == []


class TestTimes:
    async def test_come_back_aware_in_utc_on_both_databases(self, platform: Platform) -> None:
        tenant = await make_tenant(platform)
        elsewhere = datetime(2026, 7, 1, 1, 30, 0, 123456, timezone(timedelta(hours=5)))
        async with platform.db.transaction() as session:
            (await tenants.find_tenant(session, tenant.id)).updated_at = elsewhere
        async with platform.db.reading() as session:
            read = (await tenants.find_tenant(session, tenant.id)).updated_at
        assert read == elsewhere
        assert read.utcoffset() == timedelta(0)

    async def test_without_a_zone_are_refused(self, platform: Platform) -> None:
        tenant = await make_tenant(platform)

        async def store() -> None:
            async with platform.db.transaction() as session:
                row = await tenants.find_tenant(session, tenant.id)
                row.updated_at = datetime(2026, 1, 1)

        with pytest.raises(StatementError, match="naive"):
            await store()


def test_a_sqlite_file_gets_a_folder_of_its_owners(tmp_path: object) -> None:
    from pathlib import Path

    folder = Path(str(tmp_path)) / "new"
    Database(f"sqlite+aiosqlite:///{folder}/x.db")
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("times", [1, 2])
async def test_work_that_is_cancelled_ends_first(times: int) -> None:
    begun, ended = asyncio.Event(), []

    async def work() -> None:
        begun.set()
        await asyncio.sleep(0.05)
        ended.append("whole")

    task = asyncio.create_task(to_its_end(work()))
    await begun.wait()
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0.005)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["whole"]
