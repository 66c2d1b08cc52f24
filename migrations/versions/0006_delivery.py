"""Revisions and history of aliases, the alias in the ledger, webhooks."""

from typing import Any

import sqlalchemy as sa
from alembic import op

from app.db import Json, UtcDateTime
from app.ids import new_id

revision = "0006_delivery"
down_revision = "0005_uploads"
branch_labels = None
depends_on = None


def id_column(name: str = "id", *, primary_key: bool = False, to: str | None = None) -> sa.Column:
    keys = [] if to is None else [sa.ForeignKey(f"{to}.id")]
    return sa.Column(name, sa.String(40), *keys, primary_key=primary_key, nullable=False)


def upgrade() -> None:
    _add_alias_history()
    op.add_column("usage_records", sa.Column("alias", sa.String(63)))
    op.create_index(
        "ix_usage_records_target",
        "usage_records",
        ["version_id", "alias", "status", "started_at"],
        sqlite_where=sa.text("alias IS NOT NULL"),
        postgresql_where=sa.text("alias IS NOT NULL"),
    )
    _add_webhooks()


def _add_webhooks() -> None:
    op.create_table(
        "webhook_endpoints",
        id_column(primary_key=True),
        id_column("tenant_id", to="tenants"),
        sa.Column("url", sa.String(500), nullable=False),
        sa.Column("description", sa.String(200), nullable=False),
        sa.Column("events", Json, nullable=False),
        sa.Column("status", sa.String(12), nullable=False),
        sa.Column("disabled_reason", sa.String(40)),
        sa.Column("secret", sa.LargeBinary(), nullable=False),
        sa.Column("secret_version", sa.Integer(), nullable=False),
        sa.Column("previous_secret", sa.LargeBinary()),
        sa.Column("previous_version", sa.Integer()),
        sa.Column("previous_until", UtcDateTime()),
        sa.Column("failing_since", UtcDateTime()),
        sa.Column("last_success_at", UtcDateTime()),
        sa.Column("created_by", sa.String(80), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("updated_at", UtcDateTime(), nullable=False),
    )
    op.create_index("ix_webhook_endpoints_tenant_id_id", "webhook_endpoints", ["tenant_id", "id"])
    op.create_table(
        "webhook_events",
        id_column(primary_key=True),
        id_column("tenant_id", to="tenants"),
        sa.Column("type", sa.String(40), nullable=False),
        sa.Column("data", Json, nullable=False),
        sa.Column("once", sa.String(120)),
        sa.Column("created_at", UtcDateTime(), nullable=False),
    )
    op.create_index("uq_webhook_events_once", "webhook_events", ["once"], unique=True)
    op.create_index("ix_webhook_events_created_at", "webhook_events", ["created_at"])
    op.create_table(
        "webhook_deliveries",
        id_column(primary_key=True),
        id_column("endpoint_id", to="webhook_endpoints"),
        id_column("event_id", to="webhook_events"),
        id_column("tenant_id", to="tenants"),
        sa.Column("type", sa.String(40), nullable=False),
        sa.Column("state", sa.String(12), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("next_attempt_at", UtcDateTime(), nullable=False),
        sa.Column("give_up_at", UtcDateTime(), nullable=False),
        sa.Column("lease_until", UtcDateTime()),
        sa.Column("code", sa.String(24)),
        sa.Column("attempt_log", Json, nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("finished_at", UtcDateTime()),
    )
    for columns in (["endpoint_id", "id"], ["finished_at"]):
        name = "_".join(["ix_webhook_deliveries", *columns])
        op.create_index(name, "webhook_deliveries", columns)
    op.create_index(
        "ix_webhook_deliveries_due",
        "webhook_deliveries",
        ["next_attempt_at"],
        sqlite_where=sa.text("state = 'pending'"),
        postgresql_where=sa.text("state = 'pending'"),
    )


def _add_alias_history() -> None:
    op.add_column(
        "adapter_aliases", sa.Column("revision", sa.Integer(), nullable=False, server_default="1")
    )
    changes = op.create_table(
        "adapter_alias_changes",
        id_column(primary_key=True),
        id_column("adapter_id", to="adapters"),
        sa.Column("name", sa.String(63), nullable=False),
        id_column("tenant_id", to="tenants"),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("action", sa.String(12), nullable=False),
        sa.Column("before", Json),
        sa.Column("targets", Json),
        sa.Column("by_hand", sa.Boolean(), nullable=False),
        sa.Column("actor_kind", sa.String(16), nullable=False),
        sa.Column("actor_id", sa.String(40), nullable=False),
        sa.Column("actor_label", sa.String(254), nullable=False),
        sa.Column("at", UtcDateTime(), nullable=False),
        sa.UniqueConstraint(
            "adapter_id", "name", "revision", name="uq_adapter_alias_changes_revision"
        ),
    )
    _begin_the_history_of_what_is_there(changes)


def _begin_the_history_of_what_is_there(changes: sa.Table) -> None:
    """Every alias that exists gets its first revision."""
    connection = op.get_bind()
    versions = sa.table("adapter_versions", sa.column("id"), sa.column("number"))
    numbers = dict(connection.execute(sa.select(versions.c.id, versions.c.number)).all())
    aliases = sa.table(
        "adapter_aliases",
        sa.column("adapter_id"),
        sa.column("name"),
        sa.column("tenant_id"),
        sa.column("targets", Json),
        sa.column("by_hand", sa.Boolean()),
        sa.column("updated_by"),
        sa.column("updated_at", UtcDateTime()),
    )
    rows: list[dict[str, Any]] = []
    for alias in connection.execute(sa.select(aliases)).mappings():
        rows.append(
            {
                "id": new_id("alc"),
                "adapter_id": alias["adapter_id"],
                "name": alias["name"],
                "tenant_id": alias["tenant_id"],
                "revision": 1,
                "action": "set" if alias["by_hand"] else "follow",
                "before": None,
                "targets": [
                    {**target, "version": numbers[target["version_id"]]}
                    for target in alias["targets"]
                ],
                "by_hand": alias["by_hand"],
                "actor_kind": "system",
                "actor_id": alias["updated_by"][:40],
                "actor_label": alias["updated_by"],
                "at": alias["updated_at"],
            }
        )
    if rows:
        connection.execute(changes.insert(), rows)


def downgrade() -> None:
    for table in ("webhook_deliveries", "webhook_events", "webhook_endpoints"):
        op.drop_table(table)
    op.drop_index("ix_usage_records_target", "usage_records")
    op.drop_column("usage_records", "alias")
    op.drop_table("adapter_alias_changes")
    op.drop_column("adapter_aliases", "revision")
