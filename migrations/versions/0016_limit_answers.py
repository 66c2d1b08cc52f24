"""A request for another limit can be withdrawn, and approved with another value than asked."""

import sqlalchemy as sa
from alembic import op

from app.db import UtcDateTime

revision = "0016_limit_answers"
down_revision = "0015_limit_requests"
branch_labels = None
depends_on = None

TABLE, STATE = "limit_requests", "ck_limit_requests_state"
BEFORE = "state IN ('open', 'accepted', 'declined')"
AFTER = "state IN ('open', 'approved', 'declined', 'withdrawn')"


def upgrade() -> None:
    with op.batch_alter_table(TABLE, copy_from=_table(BEFORE)) as table:
        table.drop_constraint(op.f(STATE), type_="check")
        table.add_column(sa.Column("granted", sa.Double(), nullable=True))
    op.execute("UPDATE limit_requests SET granted = wanted WHERE state = 'accepted'")
    op.execute("UPDATE limit_requests SET state = 'approved' WHERE state = 'accepted'")
    with op.batch_alter_table(TABLE, copy_from=_table(None, granted=True)) as table:
        table.create_check_constraint(op.f(STATE), AFTER)


def downgrade() -> None:
    with op.batch_alter_table(TABLE, copy_from=_table(AFTER, granted=True)) as table:
        table.drop_constraint(op.f(STATE), type_="check")
        table.drop_column("granted")
    op.execute("UPDATE limit_requests SET state = 'accepted' WHERE state = 'approved'")
    op.execute(
        "UPDATE limit_requests SET state = 'declined', answer = 'withdrawn' "
        "WHERE state = 'withdrawn'"
    )
    with op.batch_alter_table(TABLE, copy_from=_table(None)) as table:
        table.create_check_constraint(op.f(STATE), BEFORE)


def _table(states: str | None, *, granted: bool = False) -> sa.Table:
    """The table as it stands; SQLite cannot change a constraint and makes it anew from this."""
    parts: list[sa.schema.SchemaItem] = [
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("limit_name", sa.String(40), nullable=False),
        sa.Column("current", sa.Double(), nullable=True),
        sa.Column("wanted", sa.Double(), nullable=False),
        sa.Column("reason", sa.String(500), nullable=False),
        sa.Column("asked_by", sa.String(80), nullable=False),
        sa.Column("asked_label", sa.String(254), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("state", sa.String(12), nullable=False),
        sa.Column("answer", sa.String(500), server_default="", nullable=False),
        sa.Column("decided_by", sa.String(80), nullable=True),
        sa.Column("decided_label", sa.String(254), nullable=True),
        sa.Column("decided_at", UtcDateTime(), nullable=True),
        sa.CheckConstraint(
            "(state = 'open') = (decided_at IS NULL)", name=op.f("ck_limit_requests_decided")
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name="fk_limit_requests_tenant_id_tenants"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_limit_requests"),
        sa.Index("ix_limit_requests_tenant_id_id", "tenant_id", "id"),
        sa.Index("ix_limit_requests_state_id", "state", "id"),
    ]
    if granted:
        parts.append(sa.Column("granted", sa.Double(), nullable=True))
    if states is not None:
        parts.append(sa.CheckConstraint(states, name=op.f(STATE)))
    return sa.Table(TABLE, sa.MetaData(), *parts)
