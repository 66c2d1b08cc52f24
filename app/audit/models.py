"""An audit event's row. A trigger on the table refuses UPDATE and DELETE."""

from datetime import datetime
from typing import Any

from sqlalchemy import Index, String
from sqlalchemy.orm import Mapped, mapped_column

from app.db import Base, Json


class AuditEvent(Base):
    __tablename__ = "audit_events"
    __table_args__ = (Index("ix_audit_events_tenant_id_id", "tenant_id", "id"),)

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    at: Mapped[datetime] = mapped_column()
    actor_kind: Mapped[str] = mapped_column(String(16))
    """`operator`, `tenant_admin`, `tenant_viewer`, `api_key`, or `system`."""
    actor_id: Mapped[str] = mapped_column(String(40))
    """A user's or a key's id; for the system, which part of it."""
    actor_label: Mapped[str] = mapped_column(String(254))
    tenant_id: Mapped[str | None] = mapped_column(String(40))
    """No foreign key: the event outlives what it speaks of."""
    action: Mapped[str] = mapped_column(String(64))
    """`key.create`, `tenant.suspend`, …"""
    target: Mapped[str] = mapped_column(String(120))
    detail: Mapped[dict[str, Any]] = mapped_column(Json)
    request_id: Mapped[str | None] = mapped_column(String(40))
