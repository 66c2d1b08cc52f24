"""When each adapter and each version was last called, written off the request's path."""

from app.adapters import listing_repository
from app.clock import Clock
from app.db import Database
from app.last_used import Marks


class AdapterUses:
    """Collects calls in memory; `flush` writes those that are due."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._adapters, self._versions = Marks(clock), Marks(clock)

    def mark(self, adapter_id: str, version_id: str | None) -> None:
        self._adapters.mark(adapter_id)
        if version_id is not None:
            self._versions.mark(version_id)

    async def flush(self, *, everything: bool = False) -> int:
        """Writes what is due (or all of it, before the process ends); returns how many adapters."""
        adapters = self._adapters.due(everything=everything)
        versions = self._versions.due(everything=everything)
        if adapters or versions:
            async with self._db.transaction() as session:
                await listing_repository.write_last_used(session, adapters, versions)
            self._adapters.written(adapters)
            self._versions.written(versions)
        return len(adapters)
