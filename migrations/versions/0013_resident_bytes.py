"""Bytes that a tenant's adapters may hold in an engine, and that are kept for it."""

import sqlalchemy as sa
from alembic import op

revision = "0013_resident_bytes"
down_revision = "0012_key_budgets"
branch_labels = None
depends_on = None

COLUMNS = ("max_resident_bytes", "reserved_resident_bytes")


def upgrade() -> None:
    for name in COLUMNS:
        op.add_column("tenants", sa.Column(name, sa.BigInteger(), nullable=True))


def downgrade() -> None:
    for name in COLUMNS:
        op.drop_column("tenants", name)
