"""An API key's row: never the key, only its keyed hash."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from app.db import Base, Json


class ApiKey(Base):
    __tablename__ = "api_keys"
    __table_args__ = (
        CheckConstraint("role IN ('api_key', 'operator')", name="role"),
        CheckConstraint("(role = 'operator') = (tenant_id IS NULL)", name="operator_has_no_tenant"),
    )

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    tenant_id: Mapped[str | None] = mapped_column(ForeignKey("tenants.id"), index=True)
    role: Mapped[str] = mapped_column(String(16))
    name: Mapped[str] = mapped_column(String(100))
    """May be empty; a key is always shown with its public id."""
    public_id: Mapped[str] = mapped_column(String(16), unique=True)
    secret_hash: Mapped[str] = mapped_column(String(64))
    hash_version: Mapped[int] = mapped_column()
    last4: Mapped[str] = mapped_column(String(4))
    scopes: Mapped[dict[str, Any]] = mapped_column(Json)
    """{"adapters": [names], "access": "read", "networks": [CIDRs]}; an entry that is absent
    restricts nothing."""
    requests_per_minute: Mapped[int | None] = mapped_column()
    tokens_per_minute: Mapped[int | None] = mapped_column()
    max_concurrent: Mapped[int | None] = mapped_column()
    monthly_tokens: Mapped[int | None] = mapped_column(BigInteger)
    ttft_ms: Mapped[float | None] = mapped_column()
    tpot_ms: Mapped[float | None] = mapped_column()
    budget_percentile: Mapped[float | None] = mapped_column()
    created_by: Mapped[str] = mapped_column(String(40))
    created_at: Mapped[datetime] = mapped_column()
    expires_at: Mapped[datetime | None] = mapped_column()
    revoke_at: Mapped[datetime | None] = mapped_column()
    """After a rotation: until when the old key still works."""
    revoked_at: Mapped[datetime | None] = mapped_column()
    last_used_at: Mapped[datetime | None] = mapped_column()
