"""Tenants, keys, users, sessions, audit."""

import sqlalchemy as sa
from alembic import op

from app.db import Json, UtcDateTime

revision = "0001_platform"
down_revision = None
branch_labels = None
depends_on = None

POSTGRES_APPEND_ONLY = """
CREATE FUNCTION audit_events_refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'audit_events is append-only';
END $$;
CREATE TRIGGER audit_events_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_events
    FOR EACH STATEMENT EXECUTE FUNCTION audit_events_refuse();
"""


def upgrade() -> None:
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column("name", sa.String(64), nullable=False, unique=True),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("salt", sa.String(32), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("ttft_ms", sa.Double()),
        sa.Column("tpot_ms", sa.Double()),
        sa.Column("requests_per_minute", sa.Integer()),
        sa.Column("tokens_per_minute", sa.Integer()),
        sa.Column("max_concurrent", sa.Integer()),
        sa.Column("monthly_tokens", sa.BigInteger()),
        sa.Column("max_adapters", sa.Integer()),
        sa.Column("max_stored_bytes", sa.BigInteger()),
        sa.Column("max_rank", sa.Integer()),
        sa.Column("max_tokens", sa.Integer()),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("updated_at", UtcDateTime(), nullable=False),
        sa.CheckConstraint("status IN ('active', 'suspended')", name="status"),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column("tenant_id", sa.String(40), sa.ForeignKey("tenants.id")),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("public_id", sa.String(16), nullable=False, unique=True),
        sa.Column("secret_hash", sa.String(64), nullable=False),
        sa.Column("hash_version", sa.Integer(), nullable=False),
        sa.Column("last4", sa.String(4), nullable=False),
        sa.Column("scopes", Json, nullable=False),
        sa.Column("requests_per_minute", sa.Integer()),
        sa.Column("tokens_per_minute", sa.Integer()),
        sa.Column("max_concurrent", sa.Integer()),
        sa.Column("monthly_tokens", sa.BigInteger()),
        sa.Column("created_by", sa.String(40), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("expires_at", UtcDateTime()),
        sa.Column("revoke_at", UtcDateTime()),
        sa.Column("revoked_at", UtcDateTime()),
        sa.Column("last_used_at", UtcDateTime()),
        sa.CheckConstraint("role IN ('api_key', 'operator')", name="role"),
        sa.CheckConstraint(
            "(role = 'operator') = (tenant_id IS NULL)", name="operator_has_no_tenant"
        ),
    )
    op.create_index("ix_api_keys_tenant_id", "api_keys", ["tenant_id"])
    op.create_table(
        "users",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column("email", sa.String(254), nullable=False, unique=True),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("tenant_id", sa.String(40), sa.ForeignKey("tenants.id")),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("password_hash", sa.String(200)),
        sa.Column("must_change_password", sa.Boolean(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("last_sign_in_at", UtcDateTime()),
        sa.CheckConstraint("role IN ('operator', 'tenant_admin', 'tenant_viewer')", name="role"),
        sa.CheckConstraint("status IN ('invited', 'active', 'suspended')", name="status"),
        sa.CheckConstraint(
            "(role = 'operator') = (tenant_id IS NULL)", name="operator_has_no_tenant"
        ),
    )
    op.create_index("ix_users_tenant_id", "users", ["tenant_id"])
    user = sa.ForeignKey("users.id", ondelete="CASCADE")
    op.create_table(
        "user_sessions",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column("user_id", sa.String(40), user, nullable=False),
        sa.Column("token_hash", sa.String(64), nullable=False, unique=True),
        sa.Column("hash_version", sa.Integer(), nullable=False),
        sa.Column("address", sa.String(64), nullable=False),
        sa.Column("user_agent", sa.String(200), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("last_seen_at", UtcDateTime(), nullable=False),
        sa.Column("expires_at", UtcDateTime(), nullable=False),
    )
    op.create_index("ix_user_sessions_user_id", "user_sessions", ["user_id"])
    op.create_index("ix_user_sessions_expires_at", "user_sessions", ["expires_at"])
    op.create_table(
        "user_tokens",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column(
            "user_id",
            sa.String(40),
            sa.ForeignKey("users.id", ondelete="CASCADE"),
            nullable=False,
        ),
        sa.Column("token_hash", sa.String(64), nullable=False, unique=True),
        sa.Column("hash_version", sa.Integer(), nullable=False),
        sa.Column("created_by", sa.String(40), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("expires_at", UtcDateTime(), nullable=False),
        sa.Column("used_at", UtcDateTime()),
        sa.CheckConstraint("kind IN ('invitation', 'password-reset')", name="kind"),
    )
    op.create_index("ix_user_tokens_user_id", "user_tokens", ["user_id"])
    op.create_table(
        "sign_in_counters",
        sa.Column("subject", sa.String(80), primary_key=True),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("last_failure_at", UtcDateTime(), nullable=False),
    )
    op.create_index("ix_sign_in_counters_last_failure_at", "sign_in_counters", ["last_failure_at"])
    op.create_table(
        "kept_answers",
        sa.Column("caller_id", sa.String(40), primary_key=True),
        sa.Column("key_hash", sa.String(64), primary_key=True),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
    )
    op.create_index("ix_kept_answers_created_at", "kept_answers", ["created_at"])
    op.create_table(
        "audit_events",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column("at", UtcDateTime(), nullable=False),
        sa.Column("actor_kind", sa.String(16), nullable=False),
        sa.Column("actor_id", sa.String(40), nullable=False),
        sa.Column("actor_label", sa.String(254), nullable=False),
        sa.Column("tenant_id", sa.String(40)),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("target", sa.String(120), nullable=False),
        sa.Column("detail", Json, nullable=False),
        sa.Column("request_id", sa.String(40)),
    )
    op.create_index("ix_audit_events_tenant_id_id", "audit_events", ["tenant_id", "id"])
    _make_append_only()


def _make_append_only() -> None:
    if op.get_bind().dialect.name == "sqlite":
        for verb in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER audit_events_no_{verb.lower()} BEFORE {verb} ON audit_events "
                "BEGIN SELECT RAISE(ABORT, 'audit_events is append-only'); END"
            )
    else:
        op.execute(POSTGRES_APPEND_ONLY)


def downgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        for verb in ("update", "delete"):
            op.execute(f"DROP TRIGGER audit_events_no_{verb}")
    op.drop_table("audit_events")
    if op.get_bind().dialect.name != "sqlite":
        op.execute("DROP FUNCTION audit_events_refuse()")
    for table in (
        "kept_answers",
        "sign_in_counters",
        "user_tokens",
        "user_sessions",
        "users",
        "api_keys",
        "tenants",
    ):
        op.drop_table(table)
