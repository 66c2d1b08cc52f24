"""Engines and base models that have been seen."""

revision = "0008_engines"
down_revision = "0007_attribution"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Nothing yet."""


def downgrade() -> None:
    """Nothing yet."""
