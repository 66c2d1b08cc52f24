"""Engines that have been seen, and which of them are being drained."""

import sqlalchemy as sa
from alembic import op

from app.db import UtcDateTime

revision = "0008_engines"
down_revision = "0007_attribution"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "engines",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("address", sa.String(255), nullable=False),
        sa.Column("drained", sa.Boolean(), nullable=False),
        sa.Column("base_digest", sa.String(64)),
        sa.Column("first_seen_at", UtcDateTime(), nullable=False),
        sa.Column("last_seen_at", UtcDateTime()),
        sa.PrimaryKeyConstraint("id", name="pk_engines"),
        sa.UniqueConstraint("name", name="uq_engines_name"),
        sa.UniqueConstraint("address", name="uq_engines_address"),
    )


def downgrade() -> None:
    op.drop_table("engines")
