"""The tenant's row, and that of its deletion. A limit that is NULL is the platform's default."""

from datetime import datetime
from typing import Literal

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from app.db import Base, Json

TenantState = Literal["active", "suspended", "deleting", "deleted"]


class Tenant(Base):
    __tablename__ = "tenants"
    __table_args__ = (CheckConstraint("status IN ('active', 'suspended')", name="status"),)

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    name: Mapped[str] = mapped_column(String(64), unique=True)
    status: Mapped[str] = mapped_column(String(16))
    salt: Mapped[str] = mapped_column(String(32))
    """32 hex digits, random: separates stored adapters and cached prefixes between tenants."""
    weight: Mapped[float] = mapped_column()
    ttft_ms: Mapped[float | None] = mapped_column()
    tpot_ms: Mapped[float | None] = mapped_column()
    budget_percentile: Mapped[float | None] = mapped_column()
    requests_per_minute: Mapped[int | None] = mapped_column()
    tokens_per_minute: Mapped[int | None] = mapped_column()
    max_concurrent: Mapped[int | None] = mapped_column()
    monthly_tokens: Mapped[int | None] = mapped_column(BigInteger)
    max_adapters: Mapped[int | None] = mapped_column()
    max_stored_bytes: Mapped[int | None] = mapped_column(BigInteger)
    max_resident_bytes: Mapped[int | None] = mapped_column(BigInteger)
    reserved_resident_bytes: Mapped[int | None] = mapped_column(BigInteger)
    max_rank: Mapped[int | None] = mapped_column()
    max_tokens: Mapped[int | None] = mapped_column()
    created_at: Mapped[datetime] = mapped_column()
    updated_at: Mapped[datetime] = mapped_column()
    deleted_at: Mapped[datetime | None] = mapped_column()
    """When it was asked to go; from then on `status` is `suspended`, and nothing resumes it."""
    erased_at: Mapped[datetime | None] = mapped_column()
    """When all that goes was gone. The row stays for the ledger; its name is then its id."""

    @property
    def state(self) -> TenantState:
        if self.erased_at is not None:
            return "deleted"
        if self.deleted_at is not None:
            return "deleting"
        return "active" if self.status == "active" else "suspended"


class TenantDeletion(Base):
    """What a deletion has done so far; any process may carry it on."""

    __tablename__ = "tenant_deletions"
    __table_args__ = (Index("ix_tenant_deletions_complete", "complete"),)

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), unique=True)
    tenant_name: Mapped[str] = mapped_column(String(64))
    """The name that it had, which somebody else may have by now."""
    complete: Mapped[bool] = mapped_column()
    counts: Mapped[dict[str, int]] = mapped_column(Json)
    """{"keys_revoked", "users_removed", "sessions_ended", "uploads_dropped"}"""
    created_by: Mapped[str] = mapped_column(String(40))
    created_at: Mapped[datetime] = mapped_column()
    updated_at: Mapped[datetime] = mapped_column()
    completed_at: Mapped[datetime | None] = mapped_column()
