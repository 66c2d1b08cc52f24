"""Resumable uploads: what was announced, and which parts have arrived."""

import sqlalchemy as sa
from alembic import op

from app.db import UtcDateTime

revision = "0005_uploads"
down_revision = "0004_access"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "uploads",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column("tenant_id", sa.String(40), sa.ForeignKey("tenants.id"), nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("config_bytes", sa.BigInteger(), nullable=False),
        sa.Column("weights_bytes", sa.BigInteger(), nullable=False),
        sa.Column("part_bytes", sa.BigInteger(), nullable=False),
        sa.Column("weights_sha256", sa.String(64)),
        sa.Column("version_id", sa.String(40), sa.ForeignKey("adapter_versions.id")),
        sa.Column("created_by", sa.String(80), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("expires_at", UtcDateTime(), nullable=False),
        sa.CheckConstraint("state IN ('open', 'completed')", name="state"),
    )
    op.create_index("ix_uploads_tenant_id_state", "uploads", ["tenant_id", "state"])
    op.create_index("ix_uploads_expires_at", "uploads", ["expires_at"])
    op.create_table(
        "upload_parts",
        sa.Column("upload_id", sa.String(40), sa.ForeignKey("uploads.id"), primary_key=True),
        sa.Column("number", sa.Integer(), primary_key=True),
        sa.Column("stored_as", sa.String(64), nullable=False),
        sa.Column("nbytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("upload_parts")
    op.drop_table("uploads")
