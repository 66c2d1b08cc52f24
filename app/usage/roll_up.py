"""The daily roll-up. It is written anew from the ledger, so running it twice changes nothing."""

from datetime import timedelta

from app.clock import Clock
from app.db import Database
from app.usage import repository

LOOK_BACK = timedelta(hours=26)
"""Rows that closed within this time name the days to write: beat runs the roll-up every hour."""


async def roll_up(db: Database, clock: Clock, look_back: timedelta = LOOK_BACK) -> int:
    """Writes every day that a recently closed row belongs to; returns the number of days."""
    since = clock.now() - look_back
    async with db.transaction() as session:
        days = await repository.days_closed_since(session, since)
    for day in days:
        async with db.transaction() as session:
            await repository.roll_up_day(session, day)
    return len(days)
