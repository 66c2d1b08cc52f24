"""When each adapter was last called."""

import sqlalchemy as sa
from alembic import op

from app.db import UtcDateTime

revision = "0011_console"
down_revision = "0010_tallies"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("adapters", sa.Column("last_used_at", UtcDateTime(), nullable=True))


def downgrade() -> None:
    op.drop_column("adapters", "last_used_at")
