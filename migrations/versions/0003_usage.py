"""The usage ledger, its months and its days."""

import sqlalchemy as sa
from alembic import op

revision = "0003_usage"
down_revision = "0002_adapters"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "usage_records",
        sa.Column("request_id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("key_id", sa.String(40)),
        sa.Column("user_id", sa.String(40)),
        sa.Column("adapter_id", sa.String(40)),
        sa.Column("version_id", sa.String(40)),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("endpoint", sa.String(24), nullable=False),
        sa.Column("streamed", sa.Boolean(), nullable=False),
        sa.Column("engine", sa.String(200), nullable=False),
        sa.Column("status", sa.String(12), nullable=False),
        sa.Column("closed_by", sa.String(12)),
        sa.Column("error_code", sa.String(64)),
        sa.Column("finish_reasons", sa.JSON()),
        sa.Column("reserved_tokens", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("overshoot_tokens", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_hour", sa.Integer(), nullable=False),
        sa.Column("lease_until", sa.DateTime(timezone=True), nullable=False),
        sa.Column("closed_at", sa.DateTime(timezone=True)),
        sa.Column("queue_ms", sa.Float()),
        sa.Column("adapter_wait_ms", sa.Float()),
        sa.Column("ttft_ms", sa.Float()),
        sa.Column("total_ms", sa.Float()),
        sa.PrimaryKeyConstraint("request_id", name="pk_usage_records"),
    )
    op.create_index("ix_usage_records_tenant_started", "usage_records", ["tenant_id", "started_at"])
    op.create_index("ix_usage_records_closed", "usage_records", ["closed_at"])
    op.create_index(
        "ix_usage_records_open_lease",
        "usage_records",
        ["lease_until"],
        sqlite_where=sa.text("status = 'open'"),
        postgresql_where=sa.text("status = 'open'"),
    )
    op.create_table(
        "usage_months",
        sa.Column("owner_id", sa.String(40), nullable=False),
        sa.Column("month", sa.String(7), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("reserved", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("owner_id", "month", name="pk_usage_months"),
    )
    op.create_table(
        "usage_daily",
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("day", sa.Integer(), nullable=False),
        sa.Column("key_id", sa.String(40), nullable=False),
        sa.Column("adapter_id", sa.String(40), nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("cancelled", sa.BigInteger(), nullable=False),
        sa.Column("failed", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "tenant_id", "day", "key_id", "adapter_id", "model", name="pk_usage_daily"
        ),
    )


def downgrade() -> None:
    op.drop_table("usage_daily")
    op.drop_table("usage_months")
    op.drop_index("ix_usage_records_open_lease", "usage_records")
    op.drop_index("ix_usage_records_closed", "usage_records")
    op.drop_index("ix_usage_records_tenant_started", "usage_records")
    op.drop_table("usage_records")
