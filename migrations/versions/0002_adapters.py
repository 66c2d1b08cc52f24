"""Base models, adapters, versions, aliases, validation, erasures."""

import sqlalchemy as sa
from alembic import op

from app.db import Json, UtcDateTime

revision = "0002_adapters"
down_revision = "0001_platform"
branch_labels = None
depends_on = None

TABLES = (
    "base_models",
    "adapters",
    "adapter_versions",
    "adapter_aliases",
    "validation_runs",
    "validation_checks",
    "erasures",
    "upload_keys",
)


def id_column(name: str = "id", *, primary_key: bool = False, to: str | None = None) -> sa.Column:
    keys = [] if to is None else [sa.ForeignKey(f"{to}.id")]
    return sa.Column(name, sa.String(40), *keys, primary_key=primary_key, nullable=False)


def partial_unique(name: str, table: str, columns: list[str], where: str) -> None:
    op.create_index(
        name,
        table,
        columns,
        unique=True,
        sqlite_where=sa.text(where),
        postgresql_where=sa.text(where),
    )


def upgrade() -> None:
    op.create_table(
        "base_models",
        sa.Column("base_digest", sa.String(128), primary_key=True),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("tokenizer_digest", sa.String(128), nullable=False),
        sa.Column("description", Json, nullable=False),
        sa.Column("first_seen_at", UtcDateTime(), nullable=False),
        sa.Column("last_seen_at", UtcDateTime(), nullable=False),
    )
    op.create_table(
        "adapters",
        id_column(primary_key=True),
        id_column("tenant_id", to="tenants"),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("created_by", sa.String(80), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("erased_at", UtcDateTime()),
    )
    partial_unique("uq_adapters_live_name", "adapters", ["tenant_id", "name"], "erased_at IS NULL")
    op.create_table(
        "adapter_versions",
        id_column(primary_key=True),
        id_column("adapter_id", to="adapters"),
        id_column("tenant_id", to="tenants"),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("code", sa.String(64)),
        sa.Column("reason", sa.Text()),
        sa.Column("config_bytes", sa.BigInteger(), nullable=False),
        sa.Column("weights_bytes", sa.BigInteger(), nullable=False),
        sa.Column("rank", sa.Integer()),
        sa.Column("targets", Json),
        sa.Column("base_digest", sa.String(128)),
        sa.Column("created_by", sa.String(80), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("updated_at", UtcDateTime(), nullable=False),
        sa.Column("ready_at", UtcDateTime()),
        sa.Column("erased_at", UtcDateTime()),
        sa.UniqueConstraint("adapter_id", "number", name="uq_adapter_versions_number"),
    )
    partial_unique(
        "uq_adapter_versions_live_digest",
        "adapter_versions",
        ["adapter_id", "digest"],
        "state != 'erased'",
    )
    op.create_index(
        "ix_adapter_versions_tenant_digest", "adapter_versions", ["tenant_id", "digest"]
    )
    op.create_table(
        "adapter_aliases",
        id_column("adapter_id", primary_key=True, to="adapters"),
        sa.Column("name", sa.String(63), primary_key=True),
        id_column("tenant_id", to="tenants"),
        sa.Column("targets", Json, nullable=False),
        sa.Column("by_hand", sa.Boolean(), nullable=False),
        sa.Column("updated_by", sa.String(80), nullable=False),
        sa.Column("updated_at", UtcDateTime(), nullable=False),
    )
    op.create_table(
        "validation_runs",
        id_column(primary_key=True),
        id_column("version_id", to="adapter_versions"),
        id_column("tenant_id", to="tenants"),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("owner", sa.String(40)),
        sa.Column("lease_until", UtcDateTime()),
        sa.Column("not_before", UtcDateTime()),
        sa.Column("sent_at", UtcDateTime()),
        sa.Column("code", sa.String(64)),
        sa.Column("message", sa.Text()),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("started_at", UtcDateTime()),
        sa.Column("finished_at", UtcDateTime()),
    )
    op.create_index("ix_validation_runs_open", "validation_runs", ["state", "lease_until"])
    op.create_index("ix_validation_runs_version_id", "validation_runs", ["version_id"])
    partial_unique(
        "uq_validation_runs_open_version",
        "validation_runs",
        ["version_id"],
        "state IN ('queued', 'running')",
    )
    op.create_table(
        "validation_checks",
        id_column(primary_key=True),
        id_column("run_id", to="validation_runs"),
        id_column("version_id", to="adapter_versions"),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("check_group", sa.String(16), nullable=False),
        sa.Column("status", sa.String(8), nullable=False),
        sa.Column("findings", Json, nullable=False),
        sa.Column("figures", Json, nullable=False),
        sa.Column("duration_ms", sa.Integer(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.UniqueConstraint("run_id", "position", name="uq_validation_checks_position"),
    )
    op.create_table(
        "erasures",
        id_column(primary_key=True),
        id_column("tenant_id", to="tenants"),
        id_column("adapter_id", to="adapters"),
        sa.Column("complete", sa.Boolean(), nullable=False),
        sa.Column("items", Json, nullable=False),
        sa.Column("created_by", sa.String(80), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("updated_at", UtcDateTime(), nullable=False),
    )
    op.create_index("ix_erasures_complete", "erasures", ["complete"])
    op.create_table(
        "upload_keys",
        id_column("tenant_id", primary_key=True, to="tenants"),
        sa.Column("key_hash", sa.String(64), primary_key=True),
        id_column("version_id", to="adapter_versions"),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
    )


def downgrade() -> None:
    for table in reversed(TABLES):
        op.drop_table(table)
