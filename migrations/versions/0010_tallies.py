"""Counters of what workers do, which every api shows in /metrics."""

import sqlalchemy as sa
from alembic import op

revision = "0010_tallies"
down_revision = "0009_budgets"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "tallies",
        sa.Column("name", sa.String(40), nullable=False),
        sa.Column("label", sa.String(40), nullable=False),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", "label", name="pk_tallies"),
    )


def downgrade() -> None:
    op.drop_table("tallies")
