"""A canary's figures over the API, from rows of the ledger; on both databases in the wide run."""

from datetime import timedelta
from typing import Any

import httpx
import pytest
from sqlalchemy import event, insert, text

from app.adapters.models import AdapterVersion
from app.keys.service import NewKey
from app.platform import Platform
from app.tenants.models import Tenant
from app.usage.entries import hour_of
from app.usage.models import UsageRecord
from tests.factories import bearer, make_key, make_tenant
from tests.serving import add_version, make_ready_adapter

PATH = "/v1/adapters/support/aliases/live"


@pytest.fixture
def database_url(any_database_url: str) -> str:
    return any_database_url


@pytest.fixture
async def tenant(platform: Platform) -> Tenant:
    return await make_tenant(platform)


@pytest.fixture
async def key(platform: Platform, tenant: Tenant) -> NewKey:
    return await make_key(platform, tenant)


@pytest.fixture
async def canary(
    client: httpx.AsyncClient, platform: Platform, tenant: Tenant, key: NewKey
) -> list[AdapterVersion]:
    """`live`: 90 % version 1, 10 % version 2; an hour and a half later."""
    first = await make_ready_adapter(platform, tenant)
    second = await add_version(platform, first, 2)
    targets = [{"version": 1, "weight": 90}, {"version": 2, "weight": 10}]
    await client.put(PATH, json={"targets": targets}, headers=bearer(key))
    platform.clock.advance(seconds=5400)  # type: ignore[attr-defined]
    return [first, second]


async def record(platform: Platform, version: AdapterVersion, count: int, **changes: Any) -> None:
    """Rows of completed requests that came by `live` a minute ago, or as `changes` says."""
    age = timedelta(seconds=changes.pop("age_s", 60))
    at = platform.clock.now() - age
    values: dict[str, Any] = {
        "tenant_id": version.tenant_id,
        "adapter_id": version.adapter_id,
        "version_id": version.id,
        "alias": "live",
        "model": f"support@v{version.number}",
        "endpoint": "chat.completions",
        "streamed": True,
        "engine": "ipc://fake",
        "status": "completed",
        "finish_reasons": ["stop"],
        "reserved_tokens": 100,
        "prompt_tokens": 10,
        "cached_tokens": 0,
        "completion_tokens": 11,
        "overshoot_tokens": 0,
        "started_at": at,
        "started_hour": hour_of(at),
        "lease_until": at,
        "ttft_ms": 100.0,
        "total_ms": 300.0,
    }
    async with platform.db.transaction() as session:
        taken = await session.scalar(text("SELECT count(*) FROM usage_records")) or 0
        rows = [{**values, **changes, "request_id": f"req_{taken + n}"} for n in range(count)]
        await session.execute(insert(UsageRecord), rows)


async def compared(
    client: httpx.AsyncClient, key: NewKey, window: str = "change"
) -> dict[int, dict[str, Any]]:
    answer = await client.get(f"{PATH}/comparison", params={"window": window}, headers=bearer(key))
    assert answer.status_code == 200, answer.text
    return {target["version"]: target for target in answer.json()["targets"]}


async def test_targets_stand_side_by_side(
    client: httpx.AsyncClient, platform: Platform, key: NewKey, canary: list[AdapterVersion]
) -> None:
    old, new = canary
    await record(platform, old, 9)
    await record(platform, new, 2, completion_tokens=21, finish_reasons=["length"], ttft_ms=150.0)
    await record(platform, new, 1, status="failed", error_code="engine_lost")
    await record(platform, new, 1, status="cancelled")
    await record(platform, new, 1, status="open")
    found = await compared(client, key)
    assert list(found) == [1, 2]
    assert (found[1]["weight"], found[1]["requests"], found[1]["error_rate"]) == (90, 9, 0.0)
    assert found[2] == {
        "version": 2,
        "weight": 10,
        "state": "ready",
        "requests": 5,
        "running": 1,
        "completed": 2,
        "cancelled": 1,
        "failed": 1,
        "error_rate": 0.25,
        "errors": [{"code": "engine_lost", "requests": 1}],
        "sampled": 2,
        "finish_reasons": {"length": 2},
        "output_tokens": {"mean": 21.0, "p50": 21, "p95": 21},
        "ttft_ms": {"p50": 150.0, "p95": 150.0, "p99": 150.0},
        "token_ms": {"p50": 7.5, "p95": 7.5, "p99": 7.5},
    }


async def test_only_calls_that_came_by_the_alias_count(
    client: httpx.AsyncClient, platform: Platform, key: NewKey, canary: list[AdapterVersion]
) -> None:
    await record(platform, canary[0], 3, alias=None)
    await record(platform, canary[0], 2, alias="stable")
    await record(platform, canary[0], 1)
    assert (await compared(client, key))[1]["requests"] == 1


@pytest.mark.parametrize(("window", "requests"), [("change", 3), ("1h", 1), ("24h", 7)])
async def test_a_window_takes_what_began_in_it(
    window: str,
    requests: int,
    client: httpx.AsyncClient,
    platform: Platform,
    key: NewKey,
    canary: list[AdapterVersion],
) -> None:
    await record(platform, canary[0], 1)
    await record(platform, canary[0], 2, age_s=5000)
    await record(platform, canary[0], 4, age_s=6000)
    await record(platform, canary[0], 8, age_s=90_000)
    assert (await compared(client, key, window))[1]["requests"] == requests


async def test_a_version_that_left_in_the_window_is_shown_without_weight(
    client: httpx.AsyncClient, platform: Platform, key: NewKey, canary: list[AdapterVersion]
) -> None:
    await record(platform, canary[0], 9)
    await client.post(f"{PATH}/promote", json={"version": 2}, headers=bearer(key))
    assert list(await compared(client, key)) == [2]
    found = await compared(client, key, "1h")
    assert [(number, target["weight"]) for number, target in found.items()] == [(2, 100), (1, 0)]
    assert found[1]["requests"] == 9


async def test_it_takes_few_statements_and_an_index_range_however_many_rows(
    client: httpx.AsyncClient, platform: Platform, key: NewKey, canary: list[AdapterVersion]
) -> None:
    await record(platform, canary[0], 500)
    statements: list[tuple[str, Any]] = []

    def note(_c: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        statements.append((statement, parameters))

    event.listen(platform.db.engine.sync_engine, "before_cursor_execute", note)
    await compared(client, key, "24h")
    event.remove(platform.db.engine.sync_engine, "before_cursor_execute", note)
    ledger = [entry for entry in statements if "FROM usage_records" in entry[0]]
    assert len(ledger) == 3
    if platform.db.url.startswith("sqlite"):
        async with platform.db.reading() as session:
            connection = await session.connection()
            for statement, parameters in ledger:
                plan = await connection.exec_driver_sql(
                    f"EXPLAIN QUERY PLAN {statement}", parameters
                )
                reads = [row[3] for row in plan if "usage_records" in row[3]]
                assert reads
                assert all("ix_usage_records_target (version_id=" in read for read in reads), reads
                assert all("started_at>" in read for read in reads), reads


async def test_an_unknown_window_names_the_field(
    client: httpx.AsyncClient, key: NewKey, canary: list[AdapterVersion]
) -> None:
    answer = await client.get(f"{PATH}/comparison?window=7d", headers=bearer(key))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "window")


async def test_a_foreign_comparison_is_an_unknown_one(
    client: httpx.AsyncClient, platform: Platform, canary: list[AdapterVersion]
) -> None:
    stranger = await make_key(platform, await make_tenant(platform))
    answer = await client.get(f"{PATH}/comparison", headers=bearer(stranger))
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "adapter_not_found")
