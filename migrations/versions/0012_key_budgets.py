"""A key's own latency budget."""

import sqlalchemy as sa
from alembic import op

revision = "0012_key_budgets"
down_revision = "0011_console"
branch_labels = None
depends_on = None

COLUMNS = ("ttft_ms", "tpot_ms", "budget_percentile")


def upgrade() -> None:
    for name in COLUMNS:
        op.add_column("api_keys", sa.Column(name, sa.Double(), nullable=True))


def downgrade() -> None:
    for name in COLUMNS:
        op.drop_column("api_keys", name)
