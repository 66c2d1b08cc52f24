"""A ledger over a migrated database, and a tenant's entries."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import inspect, text

from app.platform import Platform
from app.usage.entries import FinalEntry, OpenEntry
from app.usage.metrics import UsageMetrics
from app.usage.service import Ledger
from app.usage.spool import Spool

ENGINE = "ipc://fake"


WIDE = [pytest.mark.postgres, pytest.mark.wide]


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=WIDE)])
def database_url(request: pytest.FixtureRequest) -> str:
    """PostgreSQL too in the wide run; the statements that differ run on both always."""
    return str(request.getfixturevalue(f"{request.param}_url"))


AWAY = "usage_records_away"


async def take_database_away(platform: Platform) -> None:
    """Every statement on the ledger fails until it is brought back."""
    async with platform.db.transaction() as session:
        await session.execute(text(f"ALTER TABLE usage_records RENAME TO {AWAY}"))


async def bring_database_back(platform: Platform) -> None:
    """Does nothing when it is there: the database is shared by the tests after this one."""
    async with platform.db.transaction() as session:
        connection = await session.connection()
        if await connection.run_sync(lambda sync: inspect(sync).has_table(AWAY)):
            await session.execute(text(f"ALTER TABLE {AWAY} RENAME TO usage_records"))


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def acknowledged() -> list[str]:
    """Request ids that the engine was told to forget."""
    return []


@pytest.fixture
async def ledger(
    platform: Platform, registry: CollectorRegistry, acknowledged: list[str]
) -> AsyncIterator[Ledger]:
    async def acknowledge(engine: str, request_ids: list[str]) -> None:
        acknowledged.extend(request_ids)

    opened = platform.ledger = Ledger(
        platform.db,
        platform.clock,
        Spool(platform.settings.data_dir / "spool"),
        UsageMetrics(registry),
        lease_s=900,
        acknowledge=acknowledge,
    )
    await opened.start()
    yield opened
    await opened.close()
    await bring_database_back(platform)


def opening(request_id: str, **changes: Any) -> OpenEntry:
    values: dict[str, Any] = {
        "request_id": request_id,
        "tenant_id": "ten_1",
        "key_id": "key_1",
        "user_id": None,
        "adapter_id": "adp_1",
        "version_id": "ver_1",
        "model": "support@v1",
        "endpoint": "chat.completions",
        "streamed": True,
        "engine": ENGINE,
        "reserved_tokens": 100,
        "monthly": {"ten_1": None, "key_1": None},
    }
    return OpenEntry(**{**values, **changes})


@pytest.fixture
def final(platform: Platform) -> Callable[..., FinalEntry]:
    """Makes a final entry at the clock's time."""

    def make(request_id: str, **changes: Any) -> FinalEntry:
        values: dict[str, Any] = {
            "request_id": request_id,
            "engine": ENGINE,
            "status": "completed",
            "prompt_tokens": 10,
            "cached_tokens": 2,
            "completion_tokens": 5,
            "overshoot_tokens": 0,
            "finish_reasons": ["stop"],
            "closed_at": platform.clock.now(),
            "ttft_ms": 12.5,
        }
        return FinalEntry(**{**values, **changes})

    return make
