"""The row of a request for another limit."""

from datetime import datetime
from typing import Literal

from sqlalchemy import CheckConstraint, Double, ForeignKey, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from app.db import Base

RequestState = Literal["open", "approved", "declined", "withdrawn"]


class LimitRequest(Base):
    """One limit, as it was and as it should be. Answered or withdrawn once, then left as it is."""

    __tablename__ = "limit_requests"
    __table_args__ = (
        CheckConstraint("state IN ('open', 'approved', 'declined', 'withdrawn')", name="state"),
        CheckConstraint("(state = 'open') = (decided_at IS NULL)", name="decided"),
        Index("ix_limit_requests_tenant_id_id", "tenant_id", "id"),
        Index("ix_limit_requests_state_id", "state", "id"),
    )

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(40), ForeignKey("tenants.id"))
    limit_name: Mapped[str] = mapped_column(String(40))
    """The tenant's column, such as `requests_per_minute`."""
    current: Mapped[float | None] = mapped_column(Double)  # when it was asked; None: no limit
    wanted: Mapped[float] = mapped_column(Double)
    reason: Mapped[str] = mapped_column(String(500))
    asked_by: Mapped[str] = mapped_column(String(80))
    asked_label: Mapped[str] = mapped_column(String(254))
    created_at: Mapped[datetime]
    state: Mapped[str] = mapped_column(String(12))
    answer: Mapped[str] = mapped_column(String(500), server_default="")
    """Why it was declined; may be empty where it was approved."""
    granted: Mapped[float | None] = mapped_column(Double)
    """What the limit was set to by the approval, which may be other than what was wanted."""
    decided_by: Mapped[str | None] = mapped_column(String(80))
    decided_label: Mapped[str | None] = mapped_column(String(254))
    decided_at: Mapped[datetime | None]
