"""Resumable uploads and shared content."""

revision = "0005_uploads"
down_revision = "0004_access"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Nothing yet."""


def downgrade() -> None:
    """Nothing yet."""
