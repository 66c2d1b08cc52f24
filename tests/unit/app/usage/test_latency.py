"""What the overview says of a span, from the ledger's rows."""

from datetime import timedelta

import pytest
from sqlalchemy import Connection

from app.platform import Platform
from app.usage import ledger_repository
from app.usage.entries import FinalEntry, OpenEntry
from app.usage.latency import Percentiles, standing


async def ended(
    platform: Platform,
    number: int,
    *,
    tenant: str = "ten_a",
    status: str = "completed",
    error: str | None = None,
    tokens: int = 11,
    ttft_ms: float | None = 100.0,
    total_ms: float | None = 300.0,
) -> None:
    """A row of the ledger that is closed."""
    now = platform.clock.now()
    request_id = f"req_{tenant}_{number}"
    opened = OpenEntry(
        request_id=request_id, tenant_id=tenant, key_id=None, user_id=None, adapter_id=None,
        version_id=None, model="bot@v1", endpoint="completions", streamed=False, engine="ipc://a",
        reserved_tokens=0, monthly={},
    )  # fmt: skip
    final = FinalEntry(
        request_id=request_id, engine="ipc://a", status=status, error_code=error,
        finish_reasons=["stop"], prompt_tokens=5, cached_tokens=0, completion_tokens=tokens,
        overshoot_tokens=0, closed_at=now, queue_ms=1.0, adapter_wait_ms=0.0, ttft_ms=ttft_ms,
        total_ms=total_ms,
    )  # fmt: skip

    def write(connection: Connection) -> None:
        until = now + timedelta(seconds=60)
        ledger_repository.insert_open(connection, [opened], now, until)
        ledger_repository.close_rows(connection, [final], "api")

    await platform.db.write_in_thread(write)


def test_percentiles_are_values_that_were_measured() -> None:
    assert Percentiles.of([float(value) for value in range(1, 101)]) == Percentiles(50, 95, 99)
    assert Percentiles.of([7.0]) == Percentiles(7, 7, 7)
    assert Percentiles.of([]) == Percentiles(None, None, None)


async def test_a_span_is_told_by_outcome_reason_latency_and_budget(platform: Platform) -> None:
    await ended(platform, 1, ttft_ms=100.0, total_ms=300.0)  # 20 ms a token
    await ended(platform, 2, ttft_ms=900.0, total_ms=1000.0)  # 10 ms a token
    await ended(platform, 3, status="cancelled", tokens=1)
    await ended(platform, 4, status="failed", error="engine_error", tokens=0, ttft_ms=None)
    await ended(platform, 6, status="cancelled", error="api_lost", tokens=0, ttft_ms=None)
    await ended(platform, 5, tenant="ten_b", status="failed", error="other")
    async with platform.db.reading() as session:
        start = platform.clock.now() - timedelta(hours=1)
        went = await standing(
            session, "ten_a", start=start, ttft_budget_ms=500.0, tpot_budget_ms=15.0
        )
    assert (went.seen, went.completed, went.failed) == (5, 2, 1)
    assert (went.cancelled, went.interrupted) == (1, 1)
    assert dict(went.reasons) == {"engine_error": 1, "api_lost": 1}
    assert went.ttft_ms.p50 == 100.0
    assert went.tpot_ms == Percentiles(10.0, 20.0, 20.0)
    assert went.in_budget == pytest.approx(1 / 3)  # the first is slow by the token, the second late


async def test_without_a_budget_nobody_is_outside_it(platform: Platform) -> None:
    await ended(platform, 1)
    async with platform.db.reading() as session:
        start = platform.clock.now() - timedelta(hours=1)
        went = await standing(
            session, "ten_a", start=start, ttft_budget_ms=None, tpot_budget_ms=None
        )
    assert went.in_budget is None
