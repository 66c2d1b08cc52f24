"""When things were last used: collected in memory, written off the request's path."""

from collections.abc import Mapping
from datetime import datetime

from app.clock import Clock

WRITE_EVERY_MS = 55_000
"""With a flush every FLUSH_EVERY_S, what is shown is at most a minute behind."""
FLUSH_EVERY_S = 5.0
_REMEMBERED = 50_000


class Marks:
    """The last use of each id; each is due for writing at most once a minute."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pending: dict[str, datetime] = {}
        self._written_ms: dict[str, float] = {}

    def mark(self, id_: str) -> None:
        self._pending[id_] = self._clock.now()

    def due(self, *, everything: bool = False) -> dict[str, datetime]:
        """What is to be written now (or all of it, before the process ends)."""
        now_ms = self._clock.monotonic_ms()
        return {
            id_: at
            for id_, at in self._pending.items()
            if everything or now_ms - self._written_ms.get(id_, -1e18) >= WRITE_EVERY_MS
        }

    def written(self, due: Mapping[str, datetime]) -> None:
        """What `due` gave is in the database; a use in the meantime stays pending."""
        now_ms = self._clock.monotonic_ms()
        for id_, at in due.items():
            if self._pending.get(id_) == at:
                del self._pending[id_]
            self._written_ms[id_] = now_ms
        if len(self._written_ms) > _REMEMBERED:
            self._written_ms.clear()
