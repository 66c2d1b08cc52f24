"""One counter: what is counted, and of which kind."""

from sqlalchemy import BigInteger, String
from sqlalchemy.orm import Mapped, mapped_column

from app.db import Base


class Tally(Base):
    __tablename__ = "tallies"

    name: Mapped[str] = mapped_column(String(40), primary_key=True)
    label: Mapped[str] = mapped_column(String(40), primary_key=True)
    """ "" where the counter has no kinds."""
    value: Mapped[int] = mapped_column(BigInteger)
    """It only grows."""
