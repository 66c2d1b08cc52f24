"""Rows of users, their sessions, their one-use tokens, and the counters that slow guessing."""

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from app.db import Base


class User(Base):
    __tablename__ = "users"
    __table_args__ = (
        CheckConstraint("role IN ('operator', 'tenant_admin', 'tenant_viewer')", name="role"),
        CheckConstraint("status IN ('invited', 'active', 'suspended')", name="status"),
        CheckConstraint("(role = 'operator') = (tenant_id IS NULL)", name="operator_has_no_tenant"),
    )

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    email: Mapped[str] = mapped_column(String(254), unique=True)
    """Lower case. The first operator's is the plain word `operator`."""
    role: Mapped[str] = mapped_column(String(16))
    tenant_id: Mapped[str | None] = mapped_column(ForeignKey("tenants.id"), index=True)
    status: Mapped[str] = mapped_column(String(16))
    password_hash: Mapped[str | None] = mapped_column(String(200))
    """argon2id; NULL until an invitation is accepted."""
    must_change_password: Mapped[bool] = mapped_column()
    created_at: Mapped[datetime] = mapped_column()
    last_sign_in_at: Mapped[datetime | None] = mapped_column()


class UserSession(Base):
    __tablename__ = "user_sessions"

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"), index=True)
    token_hash: Mapped[str] = mapped_column(String(64), unique=True)
    hash_version: Mapped[int] = mapped_column()
    address: Mapped[str] = mapped_column(String(64))
    user_agent: Mapped[str] = mapped_column(String(200))
    created_at: Mapped[datetime] = mapped_column()
    last_seen_at: Mapped[datetime] = mapped_column()
    expires_at: Mapped[datetime] = mapped_column(index=True)
    """The absolute end; the idle one counts from `last_seen_at`."""


class UserToken(Base):
    """An invitation or a password reset: works once, until it expires."""

    __tablename__ = "user_tokens"
    __table_args__ = (CheckConstraint("kind IN ('invitation', 'password-reset')", name="kind"),)

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"), index=True)
    token_hash: Mapped[str] = mapped_column(String(64), unique=True)
    hash_version: Mapped[int] = mapped_column()
    created_by: Mapped[str] = mapped_column(String(40))
    created_at: Mapped[datetime] = mapped_column()
    expires_at: Mapped[datetime] = mapped_column()
    used_at: Mapped[datetime | None] = mapped_column()


class SignInCounter(Base):
    """Failed sign-ins of one account or one address (`subject` is a keyed hash of it)."""

    __tablename__ = "sign_in_counters"

    subject: Mapped[str] = mapped_column(String(80), primary_key=True)
    failures: Mapped[int] = mapped_column()
    last_failure_at: Mapped[datetime] = mapped_column(index=True)
