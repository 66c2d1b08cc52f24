"""What each request cost, and indexes for usage."""

revision = "0007_attribution"
down_revision = "0006_delivery"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Nothing yet."""


def downgrade() -> None:
    """Nothing yet."""
