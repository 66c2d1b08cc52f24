"""The rows of webhooks. A delivery is the queue of record: the broker only carries its id."""

from datetime import datetime
from typing import Any

from sqlalchemy import ForeignKey, Index, Integer, LargeBinary, String, text
from sqlalchemy.orm import Mapped, mapped_column

from app.db import Base, Json


class WebhookEndpoint(Base):
    """Where a tenant wants to be told, and how what it is told is signed."""

    __tablename__ = "webhook_endpoints"
    __table_args__ = (Index("ix_webhook_endpoints_tenant_id_id", "tenant_id", "id"),)

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(40), ForeignKey("tenants.id"))
    url: Mapped[str] = mapped_column(String(500))
    description: Mapped[str] = mapped_column(String(200))
    events: Mapped[list[str]] = mapped_column(Json)
    status: Mapped[str] = mapped_column(String(12))  # enabled disabled
    disabled_reason: Mapped[str | None] = mapped_column(String(40))
    secret: Mapped[bytes] = mapped_column(LargeBinary)  # sealed under the root secret
    secret_version: Mapped[int] = mapped_column(Integer)  # of the root secret
    previous_secret: Mapped[bytes | None] = mapped_column(LargeBinary)
    previous_version: Mapped[int | None] = mapped_column(Integer)
    previous_until: Mapped[datetime | None]  # until then it signs too
    failing_since: Mapped[datetime | None]  # of the first failure after the last success
    last_success_at: Mapped[datetime | None]
    created_by: Mapped[str] = mapped_column(String(80))
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]


class WebhookEvent(Base):
    """What happened, once for all endpoints. `once` is unique for what must be told only once."""

    __tablename__ = "webhook_events"
    __table_args__ = (
        Index("uq_webhook_events_once", "once", unique=True),
        Index("ix_webhook_events_created_at", "created_at"),
    )

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(40), ForeignKey("tenants.id"))
    type: Mapped[str] = mapped_column(String(40))
    data: Mapped[dict[str, Any]] = mapped_column(Json)
    once: Mapped[str | None] = mapped_column(String(120))
    created_at: Mapped[datetime]


class WebhookDelivery(Base):
    """One event on its way to one endpoint. Never what the receiver answered, but its status."""

    __tablename__ = "webhook_deliveries"
    __table_args__ = (
        Index("ix_webhook_deliveries_endpoint_id_id", "endpoint_id", "id"),
        Index("ix_webhook_deliveries_finished_at", "finished_at"),
        Index(
            "ix_webhook_deliveries_due",
            "next_attempt_at",
            sqlite_where=text("state = 'pending'"),
            postgresql_where=text("state = 'pending'"),
        ),
    )

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    endpoint_id: Mapped[str] = mapped_column(String(40), ForeignKey("webhook_endpoints.id"))
    event_id: Mapped[str] = mapped_column(String(40), ForeignKey("webhook_events.id"))
    tenant_id: Mapped[str] = mapped_column(String(40), ForeignKey("tenants.id"))
    type: Mapped[str] = mapped_column(String(40))
    state: Mapped[str] = mapped_column(String(12))  # pending delivered dead
    attempts: Mapped[int] = mapped_column(Integer)
    next_attempt_at: Mapped[datetime]
    give_up_at: Mapped[datetime]
    lease_until: Mapped[datetime | None]  # a worker sends it until then
    code: Mapped[str | None] = mapped_column(String(24))  # how the last attempt ended
    attempt_log: Mapped[list[dict[str, Any]]] = mapped_column(Json)
    created_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]
