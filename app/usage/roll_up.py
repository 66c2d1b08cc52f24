"""Checks that the sums by hour and day are the ledger's.

They change in the transactions that close rows, so they are; a restored backup or a hand in the
database may part them. Running it twice changes nothing.
"""

from datetime import timedelta

import structlog

from app.clock import Clock
from app.db import Database
from app.usage import roll_up_repository as repository
from app.usage.spans import HOURS_A_DAY, hour_number

LOOK_BACK = timedelta(days=3)
"""Days that one check covers; older ones cannot have changed since they were checked last."""

log = structlog.get_logger(__name__)


async def roll_up(db: Database, clock: Clock, look_back: timedelta = LOOK_BACK) -> int:
    """Writes every day of the last ones anew that differs; returns how many did."""
    now = clock.now()
    first, last = (hour_number(at) // HOURS_A_DAY for at in (now - look_back, now))
    async with db.reading() as session:
        days = await repository.differing_days(session, first, last + 1)
    for day in days:
        log.error("usage_sums_differed_from_the_ledger", day=day)
        async with db.transaction() as session:
            await repository.rewrite_day(session, day)
    return len(days)
