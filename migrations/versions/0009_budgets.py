"""The percentile at which a tenant's latency budget is promised."""

import sqlalchemy as sa
from alembic import op

revision = "0009_budgets"
down_revision = "0008_engines"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tenants", sa.Column("budget_percentile", sa.Double(), nullable=True))


def downgrade() -> None:
    op.drop_column("tenants", "budget_percentile")
