"""The tenant's row. A limit that is NULL is the platform's default."""

from datetime import datetime

from sqlalchemy import BigInteger, CheckConstraint, String
from sqlalchemy.orm import Mapped, mapped_column

from app.db import Base


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
    max_rank: Mapped[int | None] = mapped_column()
    max_tokens: Mapped[int | None] = mapped_column()
    created_at: Mapped[datetime] = mapped_column()
    updated_at: Mapped[datetime] = mapped_column()
