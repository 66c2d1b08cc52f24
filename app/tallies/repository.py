"""SQL of the tallies."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from app.tallies.models import Tally


def add(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    """`rows`: name, label and the value to add, in the order in which they are to be locked."""
    dialect: Any = postgresql if connection.dialect.name == "postgresql" else sqlite
    statement = dialect.insert(Tally.__table__)
    grown = {"value": Tally.__table__.c.value + statement.excluded.value}
    connection.execute(
        statement.on_conflict_do_update(index_elements=["name", "label"], set_=grown), rows
    )


def labels(connection: Connection, prefix: str) -> set[str]:
    """The labels of names that begin so."""
    query = select(Tally.label).where(Tally.name.startswith(prefix, autoescape=True)).distinct()
    return set(connection.scalars(query))


async def beginning(session: AsyncSession, prefix: str) -> Sequence[Tally]:
    """Those whose names begin so, in order."""
    query = select(Tally).where(Tally.name.startswith(prefix, autoescape=True))
    return (await session.scalars(query.order_by(Tally.name, Tally.label))).all()
