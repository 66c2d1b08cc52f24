"""A platform with many tenants, adapters and ledger rows, made by SQL and kept for the next run.

One tenant has all the adapters and a fifth of the ledger, the others the rest. The ledger covers 90
days before NOW; its sums are rewritten from it day by day, as `loramux usage` would.
"""

import hashlib
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, create_engine, insert, text
from sqlalchemy.engine import make_url

from app.clock import FrozenClock
from app.crypto import Passwords
from app.db import Database, head_revision, migrate
from app.platform import Platform, open_platform
from app.settings import Settings
from app.tenants.service import find_by_name
from app.usage.models import UsageMonth
from app.usage.roll_up_repository import rewrite_day
from app.usage.spans import EPOCH, HOURS_A_DAY, hour_number
from tests.conftest import CHEAP_HASHER
from tests.console_seed import pages as tenant_pages
from tests.console_seed import seed
from tests.factories import make_key, make_tenant, make_user
from tests.fake_engine import BASE_DIGEST

NOW = datetime(2026, 6, 30, 17, 25, tzinfo=UTC)
DAYS = 90
KEYS_OF_MAIN = 20
AUDIT_EVENTS = 20_000
MAIN = "acme"


def sqlite_url(folder: Path, mark: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite+aiosqlite:///{folder.resolve()}/pages-{mark}.db"


def postgres_url(server: str, mark: str) -> str:
    """A database of its own on that server, made where there is none."""
    url = make_url(server).set(drivername="postgresql+psycopg")
    name = f"loramux_pages_{mark}"
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        known = text("SELECT count(*) FROM pg_database WHERE datname = :name")
        if not connection.scalar(known, {"name": name}):
            connection.execute(text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return url.set(database=name).render_as_string(hide_password=False)


def mark_of(tenants: int, adapters: int, rows: int) -> str:
    """What the kept rows are of: their numbers, and this file with the schema that it fills."""
    source = Path(__file__).read_bytes() + str(head_revision()).encode()
    digest = hashlib.sha256(source).hexdigest()[:8]
    return f"{tenants}_{adapters}_{rows}_{digest}"


def open_frozen(url: str, folder: Path) -> Platform:
    """The platform over that database, at NOW."""
    settings = Settings(
        database_url=url,
        data_dir=folder / "data",
        engines=["ipc://fake"],
        tenant_requests_per_minute=None,
        tenant_tokens_per_minute=None,
    )
    return open_platform(settings, clock=FrozenClock(NOW), passwords=Passwords(CHEAP_HASHER))


async def prepare(url: str, folder: Path, *, tenants: int, adapters: int, rows: int) -> Platform:
    """Fills the database where it is not yet filled."""
    migrate(url)
    platform = open_frozen(url, folder)
    async with platform.db.reading() as session:
        if await session.scalar(text("SELECT count(*) FROM usage_months WHERE owner_id = 'done'")):
            return platform
    began = time.perf_counter()
    main = await make_tenant(platform, MAIN)
    for number in range(1, tenants):
        other = await make_tenant(platform, f"tenant-{number:03}")
        await make_key(platform, other, name="production")
    await make_user(platform, main, email="admin@example.com")
    await make_user(platform, main, email="viewer@example.com", role="tenant_viewer")
    await make_user(platform, email="operator@example.com")
    for number in range(KEYS_OF_MAIN):
        await make_key(platform, main, name=f"service {number}")
    await seed(platform, main, BASE_DIGEST, adapters=adapters)
    sync = create_engine(url.replace("+aiosqlite", ""))
    with sync.begin() as connection:
        _ledger(connection, main.id, rows)
        _audit(connection, AUDIT_EVENTS)
    sync.dispose()
    await _sum_up(platform.db)
    sys.stderr.write(f"filled {rows:,} rows in {time.perf_counter() - began:.0f} s\n")
    return platform


async def addresses(platform: Platform) -> tuple[dict[str, str], str]:
    """The main tenant's pages by name, and its id."""
    async with platform.db.reading() as session:
        main = await find_by_name(session, MAIN)
        key = await session.scalar(
            text("SELECT id FROM api_keys WHERE tenant_id = :id ORDER BY id LIMIT 1"),
            {"id": main.id},
        )
        webhook = await session.scalar(
            text("SELECT id FROM webhook_endpoints WHERE tenant_id = :id"), {"id": main.id}
        )
    return tenant_pages({"key": str(key), "webhook": str(webhook)}), main.id


def _ledger(connection: Connection, main: str, rows: int) -> None:
    """Each row by its number: a fifth of them are the main tenant's, every tenth base model's."""
    postgres = connection.dialect.name == "postgresql"
    _numbered(connection, "bench_tenants", "SELECT id FROM tenants WHERE id <> :main", main)
    _numbered(connection, "bench_keys", "SELECT id FROM api_keys WHERE tenant_id = :main", main)
    _numbered(
        connection,
        "bench_versions",
        "SELECT v.id AS id, v.adapter_id AS adapter_id, a.name || '@v' || v.number AS model "
        "FROM adapter_versions v JOIN adapters a ON a.id = v.adapter_id "
        "WHERE v.tenant_id = :main",
        main,
    )
    tenants, keys, versions = (
        connection.scalar(text(f"SELECT count(*) FROM {table}")) or 1
        for table in ("bench_tenants", "bench_keys", "bench_versions")
    )
    first = (NOW - timedelta(days=DAYS) - EPOCH).total_seconds()
    at = f"({first} + i * {DAYS * 86_400 / rows})"
    moment = (
        f"to_timestamp({at})"
        if postgres
        else f"strftime('%Y-%m-%d %H:%M:%f000', {at}, 'unixepoch')"
    )
    numbers = (
        "generate_series(0, :rows - 1) AS n(i)"
        if postgres
        else "(WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n "
        "WHERE i < :rows - 1) SELECT i FROM n) AS n"
    )
    own, adapted = "i % 5 = 0", "i % 5 = 0 AND i % 10 <> 5"
    connection.execute(
        text(
            "INSERT INTO usage_records (request_id, tenant_id, key_id, adapter_id, version_id, "
            "alias, model, endpoint, streamed, engine, status, error_code, finish_reasons, "
            "reserved_tokens, prompt_tokens, cached_tokens, completion_tokens, overshoot_tokens, "
            "started_at, started_hour, lease_until, closed_at, ttft_ms, total_ms, prefill_us, "
            "decode_us, adapter_byte_s) "
            f"SELECT 'req_' || i, CASE WHEN {own} THEN :main ELSE t.id END, "
            f"CASE WHEN {own} THEN k.id END, CASE WHEN {adapted} THEN v.adapter_id END, "
            f"CASE WHEN {adapted} THEN v.id END, CASE WHEN {adapted} THEN 'live' END, "
            f"CASE WHEN {adapted} THEN v.model ELSE 'base' END, 'chat.completions', "
            f"{'true' if postgres else '1'}, 'ipc://fake', "
            "CASE i % 10 WHEN 3 THEN 'cancelled' WHEN 5 THEN 'failed' ELSE 'completed' END, "
            "CASE i % 10 WHEN 5 THEN 'engine_error' END, '[\"stop\"]', 600, i % 500, i % 40, "
            f"i % 200, i % 3, {moment}, CAST(floor({at} / 3600) AS integer), {moment}, {moment}, "
            f"40 + i % 300, 900 + i % 2000, i % 9000, i % 7000, i % 100000 FROM {numbers} "
            f"JOIN bench_tenants t ON t.number = i % {tenants} "
            f"JOIN bench_keys k ON k.number = i / 5 * 31 / 7 % {keys} "
            f"JOIN bench_versions v ON v.number = i / 10 * 797 % {versions}"
        ),
        {"rows": rows, "main": main},
    )


def _numbered(connection: Connection, table: str, query: str, main: str) -> None:
    """What the query finds, numbered from 0."""
    connection.execute(
        text(
            f"CREATE TEMPORARY TABLE {table} AS SELECT q.*, row_number() OVER (ORDER BY q.id) - 1 "
            f"AS number FROM ({query}) AS q"
        ),
        {"main": main} if ":main" in query else {},
    )
    connection.execute(text(f"CREATE UNIQUE INDEX ix_{table} ON {table} (number)"))


def _audit(connection: Connection, count: int) -> None:
    tenants = [row[0] for row in connection.execute(text("SELECT id FROM tenants ORDER BY id"))]
    rows: list[dict[str, Any]] = [
        {
            "id": f"aud_{n:026}",
            "at": NOW - timedelta(minutes=3 * (count - n)),
            "tenant_id": tenants[n % len(tenants)],
            "actor_kind": "user",
            "actor_id": f"usr_{n % 40}",
            "actor_label": f"person-{n % 40}@example.com",
            "action": ("key.create", "alias.set", "adapter.upload", "tenant.update")[n % 4],
            "target": f"thing_{n % 500}",
            "detail": {"name": f"thing {n}"},
        }
        for n in range(count)
    ]
    from app.audit.models import AuditEvent

    connection.execute(insert(AuditEvent), rows)


async def _sum_up(db: Database) -> None:
    first, last = (hour_number(at) // HOURS_A_DAY for at in (NOW - timedelta(days=DAYS + 1), NOW))
    for day in range(first, last + 1):
        async with db.transaction() as session:
            await rewrite_day(session, day)
    async with db.transaction() as session:
        session.add(UsageMonth(owner_id="done", month="2026-06", tokens=0, reserved=0))
    async with db.transaction() as session:
        await session.execute(text("ANALYZE"))
    if db.engine.dialect.name == "sqlite":
        async with db.reading() as session:
            await session.execute(text("PRAGMA wal_checkpoint(TRUNCATE)"))
