"""The engine's row: that it was seen, and what the operator wants of it."""

from datetime import datetime

from sqlalchemy import String
from sqlalchemy.orm import Mapped, mapped_column

from app.db import Base


class EngineRecord(Base):
    __tablename__ = "engines"

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    name: Mapped[str] = mapped_column(String(64), unique=True)
    """`engine-0`, `engine-1`, … in the order in which they were first seen."""
    address: Mapped[str] = mapped_column(String(255), unique=True)
    drained: Mapped[bool] = mapped_column()
    """Whether the operator wants it to take no new requests. It survives a restart."""
    base_digest: Mapped[str | None] = mapped_column(String(64))
    first_seen_at: Mapped[datetime] = mapped_column()
    last_seen_at: Mapped[datetime | None] = mapped_column()
    """When it last answered, within half a minute; None: never."""
