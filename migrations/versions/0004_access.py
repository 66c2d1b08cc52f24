"""Tenants that are deleted, and what their deletion has done."""

import sqlalchemy as sa
from alembic import op

from app.db import Json, UtcDateTime

revision = "0004_access"
down_revision = "0003_usage"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tenants", sa.Column("deleted_at", UtcDateTime()))
    op.add_column("tenants", sa.Column("erased_at", UtcDateTime()))
    op.create_table(
        "tenant_deletions",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column(
            "tenant_id", sa.String(40), sa.ForeignKey("tenants.id"), nullable=False, unique=True
        ),
        sa.Column("tenant_name", sa.String(64), nullable=False),
        sa.Column("complete", sa.Boolean(), nullable=False),
        sa.Column("counts", Json, nullable=False),
        sa.Column("created_by", sa.String(40), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("updated_at", UtcDateTime(), nullable=False),
        sa.Column("completed_at", UtcDateTime()),
    )
    op.create_index("ix_tenant_deletions_complete", "tenant_deletions", ["complete"])


def downgrade() -> None:
    """Deleted tenants stay suspended, and so refused; their receipts go."""
    op.drop_table("tenant_deletions")
    op.drop_column("tenants", "erased_at")
    op.drop_column("tenants", "deleted_at")
