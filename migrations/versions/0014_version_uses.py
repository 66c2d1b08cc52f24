"""When each version of an adapter was last called."""

import sqlalchemy as sa
from alembic import op

from app.db import UtcDateTime

revision = "0014_version_uses"
down_revision = "0013_resident_bytes"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("adapter_versions", sa.Column("last_used_at", UtcDateTime(), nullable=True))


def downgrade() -> None:
    op.drop_column("adapter_versions", "last_used_at")
