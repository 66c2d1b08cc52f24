"""Fixtures: settings on a temporary folder, fresh databases, a client of the app.

A database is migrated once a session and copied for every test that asks for one.
"""

import os
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import psycopg
import pytest
from argon2 import PasswordHasher
from fastapi import FastAPI

from app.clock import FrozenClock
from app.crypto import Passwords
from app.db import load_models, migrate
from app.main import create_app
from app.platform import Platform, open_platform
from app.settings import Settings
from tests.live import LivePlatform, free_port

POSTGRES = os.environ.get("LORAMUX_TEST_POSTGRES", "postgresql://postgres@127.0.0.1:5432/postgres")
NOON = datetime(2026, 3, 14, 12, 0, tzinfo=UTC)
CHEAP_HASHER = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("schema") / "migrated.db"
    migrate(f"sqlite+aiosqlite:///{file}")
    return file


@pytest.fixture
def sqlite_url(migrated_sqlite: Path, tmp_path: Path) -> str:
    """A migrated SQLite file of this test's own."""
    file = tmp_path / "data" / "loramux.db"
    file.parent.mkdir(mode=0o700, exist_ok=True)
    shutil.copy(migrated_sqlite, file)
    return f"sqlite+aiosqlite:///{file}"


def _postgres_url(name: str) -> str:
    server = POSTGRES.rpartition("/")[0]
    return f"{server}/{name}".replace("postgresql://", "postgresql+psycopg://")


def _on_server(statement: str) -> None:
    with psycopg.connect(POSTGRES, autocommit=True) as connection:
        connection.execute(statement)


@pytest.fixture
def empty_postgres_url() -> Iterator[str]:
    """A PostgreSQL database without any table."""
    name = f"loramux_test_{secrets.token_hex(6)}"
    _on_server(f"CREATE DATABASE {name}")
    yield _postgres_url(name)
    _on_server(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="session")
def migrated_postgres() -> Iterator[str]:
    """One migrated PostgreSQL database for the session: making one takes a second."""
    name = f"loramux_test_{secrets.token_hex(6)}"
    _on_server(f"CREATE DATABASE {name}")
    migrate(_postgres_url(name))
    yield _postgres_url(name)
    _on_server(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def postgres_url(migrated_postgres: str) -> str:
    """The migrated PostgreSQL database, emptied for this test (past its triggers too)."""
    with psycopg.connect(migrated_postgres.replace("+psycopg", "")) as connection:
        connection.execute("SET lock_timeout = '10s'")
        for table in reversed(load_models().sorted_tables):
            append_only = table.name == "audit_events"
            if append_only:
                connection.execute(f"ALTER TABLE {table.name} DISABLE TRIGGER USER")
            connection.execute(f"DELETE FROM {table.name}")
            if append_only:
                connection.execute(f"ALTER TABLE {table.name} ENABLE TRIGGER USER")
    return migrated_postgres


POSTGRES_TOO = pytest.param("postgres", marks=[pytest.mark.postgres, pytest.mark.wide])


@pytest.fixture(params=["sqlite", POSTGRES_TOO])
def any_database_url(request: pytest.FixtureRequest) -> str:
    """Runs the test on both databases. Override `database_url` with it."""
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    """What `settings` uses; a module that wants both overrides it with `any_database_url`."""
    return sqlite_url


@pytest.fixture
def settings(tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings on a temporary folder, untouched by the environment."""
    for name in list(os.environ):
        if name.startswith("LORAMUX_") and not name.startswith("LORAMUX_TEST_"):
            monkeypatch.delenv(name)
    return Settings(data_dir=tmp_path / "data", database_url=database_url)


@pytest.fixture
def clock() -> FrozenClock:
    return FrozenClock(NOON)


@pytest.fixture
async def platform(settings: Settings, clock: FrozenClock) -> AsyncIterator[Platform]:
    """A platform on a frozen clock, with cheap password hashes."""
    opened = open_platform(settings, clock=clock, passwords=Passwords(CHEAP_HASHER))
    yield opened
    await opened.close()


@pytest.fixture
def app(platform: Platform) -> FastAPI:
    return create_app(platform=platform)


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app, its lifespan entered; sends our own Origin, as a browser would."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=("127.0.0.1", 50000))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=transport,
            base_url="http://127.0.0.1:8000",
            headers={"origin": "http://127.0.0.1:8000"},
        ) as opened,
    ):
        yield opened


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePlatform]:
    """`loramux serve` with the real model, one for all tests that want a whole platform."""
    running = LivePlatform(tmp_path_factory.mktemp("live"), free_port())
    try:
        running.start()
        yield running
    finally:
        running.stop()
