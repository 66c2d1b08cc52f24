"""When each key was last used, written off the request's path, at most once a minute a key."""

from app.clock import Clock
from app.crypto import KeyedHash
from app.db import Database
from app.keys import repository
from app.last_used import Marks


class LastUsed:
    """Collects uses in memory; `flush` writes those that are due."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._marks = Marks(clock)
        self._rehashed: dict[str, tuple[int, KeyedHash]] = {}

    def mark(self, key_id: str) -> None:
        self._marks.mark(key_id)

    def rehash(self, key_id: str, old_version: int, renewed: KeyedHash) -> None:
        """Notes a key's hash under the current root secret; this drains the old version."""
        self._rehashed[key_id] = (old_version, renewed)

    async def flush(self, *, everything: bool = False) -> int:
        """Writes what is due (or all of it, before the process ends); returns the number."""
        due = self._marks.due(everything=everything)
        rehashed, self._rehashed = self._rehashed, {}
        if not due and not rehashed:
            return 0
        async with self._db.transaction() as session:
            await repository.write_last_used(session, due)
            for key_id, (old_version, renewed) in rehashed.items():
                await repository.write_hash(
                    session,
                    key_id,
                    old_version=old_version,
                    digest=renewed.digest,
                    version=renewed.version,
                )
        self._marks.written(due)
        return len(due)
