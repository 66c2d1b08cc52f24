"""The schema's history: up and down, on both databases, and equal to what the models say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, create_engine, inspect, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from app.db import alembic_config, head_revision, load_models, migrate

REVISIONS = [
    script.revision
    for script in ScriptDirectory.from_config(alembic_config("sqlite://")).walk_revisions()
][::-1]


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return str(request.getfixturevalue("empty_postgres_url"))
    return f"sqlite+aiosqlite:///{tmp_path}/empty.db"


def connect(url: str) -> Engine:
    return create_engine(url.replace("+aiosqlite", ""), poolclass=NullPool)


def revision(url: str) -> str | None:
    with connect(url).connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def objects(url: str) -> set[str]:
    """Tables, and the functions and triggers that a downgrade must take along."""
    engine = connect(url)
    with engine.connect() as connection:
        found = set(inspect(connection).get_table_names())
        if engine.dialect.name == "sqlite":
            query = "SELECT name FROM sqlite_master WHERE type IN ('trigger', 'view')"
        else:
            query = (
                "SELECT proname FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace "
                "WHERE n.nspname = 'public'"
            )
        return found | {row[0] for row in connection.execute(text(query))}


def schema(url: str) -> dict[str, list[str]]:
    """Each table's columns, indexes and constraints by name."""
    inspector = inspect(connect(url))
    return {
        table: sorted(
            [column["name"] for column in inspector.get_columns(table)]
            + [str(index["name"]) for index in inspector.get_indexes(table)]
            + [str(check["name"]) for check in inspector.get_check_constraints(table)]
            + [str(unique["name"]) for unique in inspector.get_unique_constraints(table)]
            + [str(key["name"]) for key in inspector.get_foreign_keys(table)]
        )
        for table in inspector.get_table_names()
    }


def test_the_history_is_one_line() -> None:
    script = ScriptDirectory.from_config(alembic_config("sqlite://"))
    assert len(script.get_heads()) == 1
    assert len(script.get_bases()) == 1


def test_the_models_are_what_the_migrations_make(empty_url: str) -> None:
    migrate(empty_url)
    with connect(empty_url).connect() as connection:
        context = MigrationContext.configure(connection)
        assert compare_metadata(context, load_models()) == []


def test_constraints_are_those_of_the_models_too(empty_url: str, tmp_path: Path) -> None:
    """Autogenerate does not look at check constraints, so both roads are compared by name."""
    migrate(empty_url)
    migrated = schema(empty_url)
    migrated.pop("alembic_version")
    engine = connect(empty_url)
    with engine.begin() as connection:
        load_models().drop_all(connection)
        load_models().create_all(connection)
    made = schema(empty_url)
    made.pop("alembic_version")
    assert migrated == made


def test_every_step_goes_up_and_down_again(empty_url: str) -> None:
    before: list[set[str]] = []
    for name in REVISIONS:
        before.append(objects(empty_url) - {"alembic_version"})
        migrate(empty_url, name)
        assert revision(empty_url) == name
    assert REVISIONS[-1] == head_revision()
    for name, expected in reversed(list(zip([None, *REVISIONS[:-1]], before, strict=True))):
        migrate(empty_url, name or "base")
        assert revision(empty_url) == name
        assert objects(empty_url) - {"alembic_version"} == expected


def test_requests_that_closed_before_there_were_hours_are_in_the_sums(empty_url: str) -> None:
    """Up and down with rows in the ledger: nothing of it is lost, and the sums are its own."""
    migrate(empty_url, "0006_delivery")
    engine = connect(empty_url)
    row = (
        "INSERT INTO usage_records (request_id, tenant_id, key_id, model, endpoint, streamed, "
        "engine, status, reserved_tokens, prompt_tokens, cached_tokens, completion_tokens, "
        "overshoot_tokens, started_at, started_hour, lease_until) VALUES (:id, 'ten_1', :key, "
        "'base', 'completions', :no, 'ipc://e', :status, 9, 5, 1, 2, 1, '2026-03-14 12:00:00', "
        ":hour, '2026-03-14 12:15:00')"
    )
    for index, status in enumerate(("completed", "cancelled", "failed", "open", "completed")):
        values = {"id": f"r{index}", "status": status, "no": False, "hour": 480 + 10 * index}
        with engine.begin() as connection:
            connection.execute(text(row), values | {"key": None if index % 2 else "key_1"})
    migrate(empty_url)
    figures = "sum(requests), sum(cancelled), sum(failed), sum(prompt_tokens), sum(decode_us)"
    for table, lines in (("usage_hourly", 4), ("usage_daily", 3)):
        with engine.connect() as connection:
            found = connection.execute(text(f"SELECT count(*), {figures} FROM {table}")).one()
        assert tuple(int(value) for value in found) == (lines, 4, 1, 1, 20, 0)
    migrate(empty_url, "0006_delivery")
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM usage_records")).scalar() == 5


def test_migrating_twice_changes_nothing(empty_url: str) -> None:
    migrate(empty_url)
    once = schema(empty_url)
    migrate(empty_url)
    assert schema(empty_url) == once


def test_processes_that_start_at_once_migrate_once(empty_url: str) -> None:
    script = "import sys; from app.db import migrate; migrate(sys.argv[1])"
    started = [
        subprocess.Popen([sys.executable, "-c", script, empty_url], stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    for process in started:
        _, errors = process.communicate(timeout=90)
        assert process.returncode == 0, errors.decode()[-2000:]
    assert revision(empty_url) == head_revision()


def test_a_step_that_fails_leaves_nothing_behind(
    empty_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import shutil

    from app import db

    copy = tmp_path / "migrations"
    shutil.copytree(db.MIGRATIONS, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "versions" / "9999_broken.py").write_text(
        "from alembic import op\n"
        "revision, branch_labels, depends_on = '9999_broken', None, None\n"
        f"down_revision = {REVISIONS[-1]!r}\n"
        "def upgrade():\n"
        "    op.execute('CREATE TABLE half (id INTEGER)')\n"
        "    op.execute('THIS IS NO SQL')\n"
        "def downgrade():\n"
        "    pass\n"
    )
    monkeypatch.setattr(db, "MIGRATIONS", copy)
    with pytest.raises(DBAPIError):
        migrate(empty_url)
    assert "half" not in objects(empty_url)


def test_aliases_that_were_there_begin_their_history_with_what_they_are(empty_url: str) -> None:
    migrate(empty_url, "0005_uploads")
    day = "2026-03-14 12:00:00+00:00"
    rows = [
        "INSERT INTO tenants (id, name, status, salt, weight, created_at, updated_at) "
        f"VALUES ('ten_1', 'acme', 'active', 's', 1, '{day}', '{day}')",
        "INSERT INTO adapters (id, tenant_id, name, created_by, created_at) "
        f"VALUES ('adp_1', 'ten_1', 'bot', 'usr_1', '{day}')",
        "INSERT INTO adapter_versions (id, adapter_id, tenant_id, number, digest, state, "
        "config_bytes, weights_bytes, created_by, created_at, updated_at) "
        f"VALUES ('ver_7', 'adp_1', 'ten_1', 7, 'd', 'ready', 1, 1, 'usr_1', '{day}', '{day}')",
        "INSERT INTO adapter_aliases (adapter_id, name, tenant_id, targets, by_hand, updated_by, "
        "updated_at) VALUES ('adp_1', 'live', 'ten_1', "
        f"""'[{{"version_id": "ver_7", "weight": 100}}]', true, 'usr_1', '{day}')""",
    ]
    with connect(empty_url).begin() as connection:
        for row in rows:
            connection.exec_driver_sql(row)
    migrate(empty_url, "0006_delivery")
    with connect(empty_url).connect() as connection:
        revision_now = connection.execute(text("SELECT revision FROM adapter_aliases")).scalar()
        kept = connection.execute(
            text("SELECT name, revision, action, actor_id, targets FROM adapter_alias_changes")
        ).one()
    assert revision_now == 1
    assert tuple(kept)[:4] == ("live", 1, "set", "usr_1")
    targets = kept[4] if isinstance(kept[4], list) else json.loads(kept[4])
    assert targets == [{"version_id": "ver_7", "version": 7, "weight": 100}]
    migrate(empty_url, "0005_uploads")
    with connect(empty_url).connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM adapter_aliases")).scalar() == 1


def test_requests_for_limits_that_were_accepted_are_approved_at_what_was_asked(
    empty_url: str,
) -> None:
    migrate(empty_url, "0015_limit_requests")
    day = "2026-03-14 12:00:00+00:00"
    rows = [
        "INSERT INTO tenants (id, name, status, salt, weight, created_at, updated_at) "
        f"VALUES ('ten_1', 'acme', 'active', 's', 1, '{day}', '{day}')",
        *(
            "INSERT INTO limit_requests (id, tenant_id, limit_name, wanted, reason, asked_by, "
            "asked_label, created_at, state, decided_at) VALUES "
            f"('lrq_{state}', 'ten_1', 'max_rank', 8, '', 'u', 'u', '{day}', '{state}', {at})"
            for state, at in (("open", "NULL"), ("accepted", f"'{day}'"), ("declined", f"'{day}'"))
        ),
    ]
    with connect(empty_url).begin() as connection:
        for row in rows:
            connection.exec_driver_sql(row)
    shown = text("SELECT id, state, granted FROM limit_requests ORDER BY id")
    migrate(empty_url)
    with connect(empty_url).begin() as connection:
        assert [tuple(row) for row in connection.execute(shown)] == [
            ("lrq_accepted", "approved", 8.0),
            ("lrq_declined", "declined", None),
            ("lrq_open", "open", None),
        ]
        taken_back = f"UPDATE limit_requests SET state = 'withdrawn', decided_at = '{day}' "
        connection.exec_driver_sql(taken_back + "WHERE id = 'lrq_open'")
    migrate(empty_url, "0015_limit_requests")
    with connect(empty_url).connect() as connection:
        states = connection.execute(text("SELECT state FROM limit_requests ORDER BY id")).scalars()
        assert list(states) == ["accepted", "declined", "declined"]
