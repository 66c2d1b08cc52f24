"""The ledger, and its sums, which change in the transactions that open and close its rows."""

from datetime import datetime

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Float,
    Index,
    Integer,
    PrimaryKeyConstraint,
    String,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from app.db import Base

ZERO = text("0")


class UsageRecord(Base):
    """One admitted request. `open` while it runs; closed once, by whoever comes first.

    Identifiers are kept as plain text: the ledger outlives keys, adapters and tenants.
    """

    __tablename__ = "usage_records"
    __table_args__ = (
        Index("ix_usage_records_tenant_started", "tenant_id", "started_at"),
        Index("ix_usage_records_started_hour", "started_hour"),
        Index("ix_usage_records_closed", "closed_at"),
        Index(
            "ix_usage_records_open_lease",
            "lease_until",
            sqlite_where=text("status = 'open'"),
            postgresql_where=text("status = 'open'"),
        ),
        Index(
            "ix_usage_records_target",
            *("version_id", "alias", "status", "started_at"),
            sqlite_where=text("alias IS NOT NULL"),
            postgresql_where=text("alias IS NOT NULL"),
        ),
    )

    request_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(40))
    key_id: Mapped[str | None] = mapped_column(String(40))
    user_id: Mapped[str | None] = mapped_column(String(40))
    adapter_id: Mapped[str | None] = mapped_column(String(40))
    version_id: Mapped[str | None] = mapped_column(String(40))
    alias: Mapped[str | None] = mapped_column(String(63))  # the alias that led to the version
    model: Mapped[str] = mapped_column(String(200))  # the resolved name: "support-bot@v3"
    endpoint: Mapped[str] = mapped_column(String(24))  # chat.completions | completions
    streamed: Mapped[bool] = mapped_column(Boolean)
    engine: Mapped[str] = mapped_column(String(200))  # its address: whose journal knows the rest
    status: Mapped[str] = mapped_column(String(12))  # open completed cancelled failed
    closed_by: Mapped[str | None] = mapped_column(String(12))  # api spool sweep
    error_code: Mapped[str | None] = mapped_column(String(64))
    finish_reasons: Mapped[list[str] | None] = mapped_column(JSON)
    reserved_tokens: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    completion_tokens: Mapped[int] = mapped_column(BigInteger)
    overshoot_tokens: Mapped[int] = mapped_column(BigInteger)  # generated, never billed
    started_at: Mapped[datetime]
    started_hour: Mapped[int] = mapped_column(Integer)  # hours since the epoch: what is grouped by
    lease_until: Mapped[datetime]
    closed_at: Mapped[datetime | None]
    queue_ms: Mapped[float | None] = mapped_column(Float)
    adapter_wait_ms: Mapped[float | None] = mapped_column(Float)
    ttft_ms: Mapped[float | None] = mapped_column(Float)
    total_ms: Mapped[float | None] = mapped_column(Float)
    prefill_us: Mapped[int] = mapped_column(BigInteger, server_default=ZERO)  # engine time
    decode_us: Mapped[int] = mapped_column(BigInteger, server_default=ZERO)
    adapter_byte_s: Mapped[int] = mapped_column(BigInteger, server_default=ZERO)  # while pinned


class UsageMonth(Base):
    """Tokens of a tenant or a key in one calendar month (UTC), kept in the ledger's transactions.

    `tokens` is what closed rows bill, `reserved` what open rows may still bill.
    """

    __tablename__ = "usage_months"

    owner_id: Mapped[str] = mapped_column(String(40), primary_key=True)
    month: Mapped[str] = mapped_column(String(7), primary_key=True)  # "2026-11"
    tokens: Mapped[int] = mapped_column(BigInteger)
    reserved: Mapped[int] = mapped_column(BigInteger)


class _Sums:
    """Closed rows added up in the transaction that closes them. "" stands for none in the key."""

    tenant_id: Mapped[str] = mapped_column(String(40), primary_key=True)
    key_id: Mapped[str] = mapped_column(String(40), primary_key=True)
    adapter_id: Mapped[str] = mapped_column(String(40), primary_key=True)
    model: Mapped[str] = mapped_column(String(200), primary_key=True)
    requests: Mapped[int] = mapped_column(BigInteger)
    cancelled: Mapped[int] = mapped_column(BigInteger)
    failed: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    completion_tokens: Mapped[int] = mapped_column(BigInteger)
    overshoot_tokens: Mapped[int] = mapped_column(BigInteger, server_default=ZERO)
    prefill_us: Mapped[int] = mapped_column(BigInteger, server_default=ZERO)
    decode_us: Mapped[int] = mapped_column(BigInteger, server_default=ZERO)
    adapter_byte_s: Mapped[int] = mapped_column(BigInteger, server_default=ZERO)


class UsageHourly(_Sums, Base):
    """By the hour (UTC) in which the requests began."""

    __tablename__ = "usage_hourly"
    __table_args__ = (
        PrimaryKeyConstraint("tenant_id", "hour", "key_id", "adapter_id", "model"),
        Index("ix_usage_hourly_hour", "hour"),
    )

    hour: Mapped[int] = mapped_column(Integer, primary_key=True)  # hours since the epoch


class UsageDaily(_Sums, Base):
    """By the day (UTC) on which the requests began."""

    __tablename__ = "usage_daily"
    __table_args__ = (
        PrimaryKeyConstraint("tenant_id", "day", "key_id", "adapter_id", "model"),
        Index("ix_usage_daily_day", "day"),
    )

    day: Mapped[int] = mapped_column(Integer, primary_key=True)  # days since the epoch
