"""Weighted aliases, canary figures and webhooks."""

revision = "0006_delivery"
down_revision = "0005_uploads"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Nothing yet."""


def downgrade() -> None:
    """Nothing yet."""
