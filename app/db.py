"""The database: one async engine, and the unit of work. Nothing outside this file commits."""

import asyncio
import functools
import importlib
import pkgutil
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import JSON, DateTime, MetaData, create_engine, event, inspect, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.engine import Connection, Dialect, Engine
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import DeclarativeBase
from sqlalchemy.pool import NullPool
from sqlalchemy.types import TypeDecorator

if TYPE_CHECKING:
    from alembic.config import Config

T = TypeVar("T")
SQLITE_BUSY_MS = 10_000
LAST_WORD_S = 10.0
MIGRATIONS = Path(__file__).resolve().parent.parent / "migrations"

Json = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
"""A JSON column; None is SQL's NULL."""


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Database work of a background task that may be cancelled: it ends first, within LAST_WORD_S.

    A statement that is cut off spoils its connection, and closing a spoilt one of SQLite's driver
    can wait for ever.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        give_up_at = asyncio.get_running_loop().time() + LAST_WORD_S
        while not task.done() and (left := give_up_at - asyncio.get_running_loop().time()) > 0:
            with suppress(asyncio.CancelledError):  # once more: the wait goes on
                await asyncio.wait({task}, timeout=left)
        raise


class UtcDateTime(TypeDecorator[datetime]):
    """Aware UTC datetimes on both databases (SQLite stores them naive)."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a naive datetime was given where UTC is stored")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None or value.tzinfo is not None:
            return value
        return value.replace(tzinfo=UTC)


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(column_0_label)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {datetime: UtcDateTime}


class Database:
    """Hands out transactions. `url`: sqlite+aiosqlite:///… or postgresql+psycopg://…

    Errors never show the parameters of a statement: they may hold what a caller sent.
    """

    def __init__(self, url: str) -> None:
        options: dict[str, Any] = {"hide_parameters": True}
        if url.startswith("sqlite"):
            file = Path(url.partition(":///")[2])
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            options["connect_args"] = {"timeout": SQLITE_BUSY_MS / 1000}
        else:
            options.update(pool_size=10, max_overflow=10, pool_timeout=5, pool_pre_ping=True)
        self.url = url
        self.engine: AsyncEngine = create_async_engine(url, **options)
        self._blocking = create_engine(_blocking_url(url), **options)
        if url.startswith("sqlite"):
            _prepare_sqlite(self.engine.sync_engine)
            _prepare_sqlite(self._blocking)
        self._blocking_readers = self._blocking.execution_options(loramux_reader=True)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="db-write")
        self._reader = (
            None
            if url.startswith("sqlite")
            else ThreadPoolExecutor(1, thread_name_prefix="db-read")
        )
        self._sessions = async_sessionmaker(self.engine, expire_on_commit=False)
        readers = self.engine.execution_options(loramux_reader=True)
        self._readers = async_sessionmaker(readers, expire_on_commit=False)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncSession]:
        """A session that commits when the block ends and rolls back when it raises."""
        async with self._sessions() as session, session.begin():
            yield session

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncSession]:
        """A session that only reads: never waits for SQLite's writer, and never commits."""
        async with self._readers() as session:
            yield session

    async def write_in_thread(self, work: Callable[[Connection], T]) -> T:
        """`work` as one transaction in the thread that writes, one after another.

        For what every call needs: a whole transaction is one change of threads, where a session's
        every statement is one. It is not stopped when who waits for it is cancelled.
        """

        def transaction() -> T:
            with self._blocking.begin() as connection:
                return work(connection)

        return await asyncio.get_running_loop().run_in_executor(self._writer, transaction)

    async def read_briefly(self, work: Callable[[Connection], T]) -> T:
        """A few small look-ups, for what every call needs; never waits for a writer.

        SQLite is asked at once: it reads what lies in memory, and takes no longer than a change
        of threads. PostgreSQL is waited for in a thread.
        """

        def reading() -> T:
            with self._blocking_readers.connect() as connection:
                return work(connection)

        if self._reader is None:
            return reading()
        return await asyncio.get_running_loop().run_in_executor(self._reader, reading)

    async def close(self) -> None:
        for threads in (self._writer, self._reader):
            if threads is not None:
                await asyncio.to_thread(threads.shutdown)
        self._blocking.dispose()
        await self.engine.dispose()


def _blocking_url(url: str) -> str:
    """The same database by its synchronous driver (psycopg is both)."""
    return url.replace("sqlite+aiosqlite", "sqlite")


def _prepare_sqlite(engine: Engine) -> None:
    """WAL, foreign keys, and BEGIN IMMEDIATE, so that a writer waits instead of failing."""

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver must not begin by itself
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout={SQLITE_BUSY_MS}")
        for pragma in ("journal_mode=WAL", "foreign_keys=ON", "synchronous=NORMAL"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:
        reader = connection.get_execution_options().get("loramux_reader", False)
        connection.exec_driver_sql("BEGIN" if reader else "BEGIN IMMEDIATE")


# --------------------------------------------------------------------------- the schema


def load_models() -> MetaData:
    """Imports every domain's `models.py`; the metadata then knows all tables."""
    import app

    for package in pkgutil.iter_modules(app.__path__):
        if package.ispkg and (Path(app.__path__[0]) / package.name / "models.py").exists():
            importlib.import_module(f"app.{package.name}.models")
    return Base.metadata


def alembic_config(url: str) -> "Config":
    """Alembic's configuration without an ini file; its drivers are the synchronous ones."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.set_main_option("path_separator", "os")
    config.attributes["url"] = _blocking_url(url)
    return config


def migrate(url: str, revision: str = "head") -> None:
    """Brings the schema to a revision: up to `head`, or down (`base` empties the database).

    Blocks; several processes may call it at once, one migrates and the others wait.
    """
    from alembic import command

    if url.startswith("sqlite"):
        folder = Path(url.partition(":///")[2]).parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    config = alembic_config(url)
    if _is_older(config, revision):
        command.downgrade(config, revision)
    else:
        command.upgrade(config, revision)


def _is_older(config: "Config", revision: str) -> bool:
    """Whether the database is already past that revision."""
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory

    if revision == "base" or revision.startswith("-"):
        return True
    engine = create_engine(config.attributes["url"], poolclass=NullPool)
    try:
        with engine.connect() as connection:
            current = MigrationContext.configure(connection).get_current_revision()
    finally:
        engine.dispose()
    newest_first = [s.revision for s in ScriptDirectory.from_config(config).walk_revisions()]
    if current not in newest_first or revision not in newest_first:
        return False
    return newest_first.index(revision) > newest_first.index(current)


@functools.cache
def head_revision() -> str | None:
    """The newest revision that this code knows."""
    from alembic.script import ScriptDirectory

    return ScriptDirectory.from_config(alembic_config("sqlite://")).get_current_head()


async def schema_revision(db: Database) -> str | None:
    """The revision that the database is at; None before the first migration."""
    async with db.reading() as session:
        connection = await session.connection()
        if not await connection.run_sync(lambda c: inspect(c).has_table("alembic_version")):
            return None
        result = await session.execute(text("SELECT version_num FROM alembic_version"))
        return result.scalar_one_or_none()


def after_commit(session: AsyncSession, call: Callable[[], None]) -> None:
    """Runs `call` once the session's transaction is committed; never after a rollback."""
    sync = session.sync_session
    done = False

    def committed(_session: Any) -> None:
        nonlocal done
        if not done:
            done = True
            call()

    def rolled_back(_session: Any) -> None:
        nonlocal done
        done = True

    event.listen(sync, "after_commit", committed)
    event.listen(sync, "after_rollback", rolled_back)
