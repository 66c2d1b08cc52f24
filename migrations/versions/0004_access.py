"""Users, keys and tenants: invitations, networks, scopes."""

revision = "0004_access"
down_revision = "0003_usage"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Nothing yet."""


def downgrade() -> None:
    """Nothing yet."""
