"""Counts, in the transaction of what is counted, and tells what was counted."""

from collections.abc import Mapping

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncSession

from app.tallies import repository

Amounts = Mapping[tuple[str, str], int]
"""(name, label) -> how much."""


def count(connection: Connection, amounts: Amounts) -> None:
    """Call it last in a transaction: every process that counts the same waits for its end."""
    rows = [
        {"name": name, "label": label, "value": amount}
        for (name, label), amount in sorted(amounts.items())  # one order: none deadlocks
        if amount
    ]
    if rows:
        repository.add(connection, rows)


def labels(connection: Connection, prefix: str) -> set[str]:
    """What is counted apart under names that begin so."""
    return repository.labels(connection, prefix)


async def read(session: AsyncSession, prefix: str) -> dict[tuple[str, str], int]:
    """Everything counted under names that begin so."""
    found = await repository.beginning(session, prefix)
    return {(row.name, row.label): row.value for row in found}
