"""When each key was last used, written off the request's path, at most once a minute a key."""

from datetime import datetime

from app.clock import Clock
from app.crypto import KeyedHash
from app.db import Database
from app.keys import repository

WRITE_EVERY_MS = 55_000
"""With the flush every FLUSH_EVERY_S, what is shown is at most a minute behind."""
FLUSH_EVERY_S = 5.0
_REMEMBERED = 50_000


class LastUsed:
    """Collects uses in memory; `flush` writes those that are due."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock
        self._pending: dict[str, datetime] = {}
        self._written_ms: dict[str, float] = {}
        self._rehashed: dict[str, tuple[int, KeyedHash]] = {}

    def mark(self, key_id: str) -> None:
        self._pending[key_id] = self._clock.now()

    def rehash(self, key_id: str, old_version: int, renewed: KeyedHash) -> None:
        """Notes a key's hash under the current root secret; this drains the old version."""
        self._rehashed[key_id] = (old_version, renewed)

    async def flush(self, *, everything: bool = False) -> int:
        """Writes what is due (or all of it, before the process ends); returns the number."""
        now_ms = self._clock.monotonic_ms()
        due = {
            key_id: at
            for key_id, at in self._pending.items()
            if everything or now_ms - self._written_ms.get(key_id, -1e18) >= WRITE_EVERY_MS
        }
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
        for key_id, at in due.items():
            if self._pending.get(key_id) == at:
                del self._pending[key_id]
            self._written_ms[key_id] = now_ms
        if len(self._written_ms) > _REMEMBERED:
            self._written_ms.clear()
        return len(due)
