"""Requests of tenants for other limits, and the operators' answers."""

import sqlalchemy as sa
from alembic import op

from app.db import UtcDateTime

revision = "0015_limit_requests"
down_revision = "0014_version_uses"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "limit_requests",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("limit_name", sa.String(40), nullable=False),
        sa.Column("current", sa.Double(), nullable=True),
        sa.Column("wanted", sa.Double(), nullable=False),
        sa.Column("reason", sa.String(500), nullable=False),
        sa.Column("asked_by", sa.String(80), nullable=False),
        sa.Column("asked_label", sa.String(254), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("state", sa.String(12), nullable=False),
        sa.Column("answer", sa.String(500), server_default="", nullable=False),
        sa.Column("decided_by", sa.String(80), nullable=True),
        sa.Column("decided_label", sa.String(254), nullable=True),
        sa.Column("decided_at", UtcDateTime(), nullable=True),
        sa.CheckConstraint(
            "state IN ('open', 'accepted', 'declined')", name=op.f("ck_limit_requests_state")
        ),
        sa.CheckConstraint(
            "(state = 'open') = (decided_at IS NULL)", name=op.f("ck_limit_requests_decided")
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name="fk_limit_requests_tenant_id_tenants"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_limit_requests"),
    )
    op.create_index("ix_limit_requests_tenant_id_id", "limit_requests", ["tenant_id", "id"])
    op.create_index("ix_limit_requests_state_id", "limit_requests", ["state", "id"])


def downgrade() -> None:
    op.drop_table("limit_requests")
