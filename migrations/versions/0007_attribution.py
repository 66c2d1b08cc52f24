"""What each request cost, sums by the hour, and indexes for usage."""

import sqlalchemy as sa
from alembic import op

revision = "0007_attribution"
down_revision = "0006_delivery"
branch_labels = None
depends_on = None

COSTS = ("prefill_us", "decode_us", "adapter_byte_s")
LATER = ("overshoot_tokens", *COSTS)
KEYS = "tenant_id, {bucket}, key_id, adapter_id, model"
FIGURES = (
    "requests, cancelled, failed, prompt_tokens, cached_tokens, completion_tokens, "
    "overshoot_tokens, prefill_us, decode_us, adapter_byte_s"
)
FROM_LEDGER = """
    SELECT tenant_id, {of_row}, coalesce(key_id, ''), coalesce(adapter_id, ''), model, count(*),
           sum(CASE WHEN status = 'cancelled' THEN 1 ELSE 0 END),
           sum(CASE WHEN status = 'failed' THEN 1 ELSE 0 END),
           sum(prompt_tokens), sum(cached_tokens), sum(completion_tokens), sum(overshoot_tokens),
           0, 0, 0
    FROM usage_records WHERE status <> 'open'
    GROUP BY tenant_id, {of_row}, coalesce(key_id, ''), coalesce(adapter_id, ''), model
"""


def upgrade() -> None:
    for name in COSTS:
        op.add_column("usage_records", _count(name, default=True))
    op.create_index("ix_usage_records_started_hour", "usage_records", ["started_hour"])
    for name in LATER:
        op.add_column("usage_daily", _count(name, default=True))
    op.create_index("ix_usage_daily_day", "usage_daily", ["day"])
    op.create_table(
        "usage_hourly",
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("hour", sa.Integer(), nullable=False),
        sa.Column("key_id", sa.String(40), nullable=False),
        sa.Column("adapter_id", sa.String(40), nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        *(_count(name.strip(), default=name.strip() in LATER) for name in FIGURES.split(",")),
        sa.PrimaryKeyConstraint(
            "tenant_id", "hour", "key_id", "adapter_id", "model", name="pk_usage_hourly"
        ),
    )
    op.create_index("ix_usage_hourly_hour", "usage_hourly", ["hour"])
    # From here on closing a row adds to both; what closed before is added up once.
    op.execute("DELETE FROM usage_daily")
    for table, bucket, of_row in (
        ("usage_hourly", "hour", "started_hour"),
        ("usage_daily", "day", "started_hour / 24"),
    ):
        target = f"{table} ({KEYS.format(bucket=bucket)}, {FIGURES})"
        op.execute(f"INSERT INTO {target} {FROM_LEDGER.format(of_row=of_row)}")


def downgrade() -> None:
    op.drop_index("ix_usage_hourly_hour", "usage_hourly")
    op.drop_table("usage_hourly")
    op.drop_index("ix_usage_daily_day", "usage_daily")
    for name in LATER:
        op.drop_column("usage_daily", name)
    op.drop_index("ix_usage_records_started_hour", "usage_records")
    for name in COSTS:
        op.drop_column("usage_records", name)


def _count(name: str, *, default: bool) -> "sa.Column[int]":
    return sa.Column(
        name, sa.BigInteger(), nullable=False, server_default=sa.text("0") if default else None
    )
