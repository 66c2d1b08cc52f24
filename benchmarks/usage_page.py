"""What /v1/usage costs over a million ledger rows: milliseconds and statements, on both databases.

    python -m benchmarks.usage_page [--rows 1000000] [--postgres postgresql://…] [--rounds 3]

The rows are of one tenant over 90 days (20 keys, 40 adapters, every fifth call on the base model)
and are inserted beside the sums that closing them one by one would have made; a check compares
the sums with the rows. Times are of the report itself, without HTTP; statements are counted.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, event, text

from app.db import Database, migrate
from app.usage.report import report
from app.usage.roll_up_repository import differing_days, rewrite_day
from app.usage.spans import EPOCH, HOURS_A_DAY, hour_number
from benchmarks.arguments import at_least_one

NOW = datetime(2026, 6, 30, 17, 25, tzinfo=UTC)
DAYS = 90
KEYS, ADAPTERS = 20, 40
QUERIES: dict[str, dict[str, Any]] = {
    "30 days by day": {},
    "30 days by day, key": {"group_by": ("key",)},
    "30 days by day, key, adapter, model": {"group_by": ("key", "adapter", "model")},
    "90 days by day, model": {"group_by": ("model",), "start": NOW - timedelta(days=89)},
    "7 days by hour": {"bucket": "hour", "start": NOW - timedelta(days=7)},
    "7 days by hour, adapter": {
        "bucket": "hour",
        "start": NOW - timedelta(days=7),
        "group_by": ("adapter",),
    },
    "year by month, key": {"bucket": "month", "group_by": ("key",)},
    "odd span by day, key": {
        "start": NOW - timedelta(days=30, minutes=13),
        "end": NOW - timedelta(days=2, minutes=41),
        "group_by": ("key",),
    },
    "6 hours by minute": {"bucket": "minute", "start": NOW - timedelta(hours=6)},
    "one key, 30 days by day": {"key_id": "key_7"},
    "all tenants, 30 days": {"tenant": None, "group_by": ("tenant",)},
}


def fill(url: str, rows: int) -> None:
    """Rows by SQL alone: the database counts faster than a client sends."""
    engine = create_engine(url)
    first = (NOW - timedelta(days=DAYS) - EPOCH).total_seconds()
    step = DAYS * 86_400 / rows
    postgres = engine.dialect.name == "postgresql"
    source = (
        "generate_series(0, :rows - 1) AS n(i)"
        if postgres
        else "(WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n "
        "WHERE i < :rows - 1) SELECT i FROM n) AS n"
    )
    at = f"({first} + i * {step})"
    moment = (
        f"to_timestamp({at})"
        if postgres
        else f"strftime('%Y-%m-%d %H:%M:%f000', {at}, 'unixepoch')"
    )
    key = f"'key_' || (i * 7 % {KEYS})"
    number = f"(i * 7 % {KEYS} * 2 + i / {KEYS} % 2)"
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO usage_records (request_id, tenant_id, key_id, adapter_id, model, "
                "endpoint, streamed, engine, status, reserved_tokens, prompt_tokens, "
                "cached_tokens, completion_tokens, overshoot_tokens, started_at, started_hour, "
                "lease_until, closed_at, prefill_us, decode_us, adapter_byte_s) "
                f"SELECT 'req_' || i, 'ten_1', {key}, "
                f"CASE WHEN i % 5 = 0 THEN NULL ELSE 'adp_' || {number} END, "
                f"CASE WHEN i % 5 = 0 THEN 'base' ELSE 'bot-' || {number} || '@v1' END, "
                "'chat.completions', "
                f"{'true' if postgres else '1'}, 'ipc://e', "
                "CASE i % 10 WHEN 3 THEN 'cancelled' WHEN 7 THEN 'failed' ELSE 'completed' END, "
                f"600, i % 500, i % 40, i % 200, i % 3, {moment}, "
                f"CAST(floor({at} / 3600) AS integer), {moment}, {moment}, i % 9000, i % 7000, "
                f"i % 100000 FROM {source}"
            ),
            {"rows": rows},
        )
    with engine.begin() as connection:
        connection.execute(text("ANALYZE"))
    engine.dispose()


async def measure(url: str, rounds: int) -> None:
    db = Database(url)
    first, last = (hour_number(at) // HOURS_A_DAY for at in (NOW - timedelta(days=DAYS + 1), NOW))
    for day in range(first, last + 1):
        async with db.transaction() as session:
            await rewrite_day(session, day)
    async with db.transaction() as session:
        await session.execute(text("ANALYZE"))
    async with db.reading() as session:
        assert await differing_days(session, first, last + 1) == []
    statements = 0

    def count(*_: object) -> None:
        nonlocal statements
        statements += 1

    event.listen(db.engine.sync_engine, "before_cursor_execute", count)
    print(f"\n{db.engine.dialect.name}\n{'':38} ms   worst  statements  lines")
    for name, options in QUERIES.items():
        wanted = dict(options)
        tenant = wanted.pop("tenant", "ten_1")
        times = []
        for _ in range(rounds):
            statements = 0
            began = time.perf_counter()
            async with db.reading() as session:
                found = await report(session, tenant, now=NOW, **wanted)
            times.append((time.perf_counter() - began) * 1000)
        middle = statistics.median(times)
        print(f"{name:36} {middle:6.0f} {max(times):6.0f} {statements:8} {len(found.data):9}")
    await db.close()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rows", type=at_least_one, default=1_000_000)
    options.add_argument("--rounds", type=at_least_one, default=3)
    options.add_argument("--postgres", help="an EMPTY database: postgresql://user@host/name")
    wanted = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        urls = [f"sqlite+aiosqlite:///{Path(folder)}/usage.db"]
        if wanted.postgres:
            urls.append(wanted.postgres.replace("postgresql://", "postgresql+psycopg://"))
        for url in urls:
            migrate(url)
            began = time.perf_counter()
            fill(url.replace("+aiosqlite", ""), wanted.rows)
            print(f"{wanted.rows} rows in {time.perf_counter() - began:.0f} s")
            asyncio.run(measure(url, wanted.rounds))


if __name__ == "__main__":
    main()
