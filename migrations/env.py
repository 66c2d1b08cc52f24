"""Runs migrations for `app.db.migrate`: one transaction, one process at a time."""

import sqlite3
from typing import Any

from alembic import context
from sqlalchemy import create_engine, event, text
from sqlalchemy.pool import NullPool

from app.db import SQLITE_BUSY_MS, load_models

LOCK = 0x6C6F7261  # PostgreSQL's advisory lock of whoever migrates


def run() -> None:
    url = context.config.attributes["url"]
    engine = create_engine(url, poolclass=NullPool, hide_parameters=True)
    sqlite = engine.dialect.name == "sqlite"

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: Any) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.isolation_level = None
            connection.execute(f"PRAGMA busy_timeout={SQLITE_BUSY_MS}")

    @event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if sqlite else "SELECT 1")

    try:
        with engine.begin() as connection:
            if not sqlite:
                connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
            context.configure(
                connection=connection,
                target_metadata=load_models(),
                render_as_batch=sqlite,
                transactional_ddl=True,
            )
            context.run_migrations()
    finally:
        engine.dispose()


run()
