"""When each adapter was last called, written off the request's path."""

from app.adapters import listing_repository
from app.clock import Clock
from app.db import Database
from app.last_used import Marks


class AdapterUses:
    """Collects calls in memory; `flush` writes those that are due."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._marks = Marks(clock)

    def mark(self, adapter_id: str) -> None:
        self._marks.mark(adapter_id)

    async def flush(self, *, everything: bool = False) -> int:
        """Writes what is due (or all of it, before the process ends); returns the number."""
        due = self._marks.due(everything=everything)
        if due:
            async with self._db.transaction() as session:
                await listing_repository.write_last_used(session, due)
            self._marks.written(due)
        return len(due)
