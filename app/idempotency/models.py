"""An answer that is kept for a day, sealed: it may hold a new key's text."""

from datetime import datetime

from sqlalchemy import LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from app.db import Base


class KeptAnswer(Base):
    __tablename__ = "kept_answers"

    caller_id: Mapped[str] = mapped_column(String(40), primary_key=True)
    """The user or key that asked; another caller's key is another key."""
    key_hash: Mapped[str] = mapped_column(String(64), primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(64))
    """sha256 of the route and the body, to tell a repetition from a mistake."""
    sealed: Mapped[bytes] = mapped_column(LargeBinary)
    created_at: Mapped[datetime] = mapped_column(index=True)
