"""Adapters that failed to load: refused with the reason until a time, each for its own key."""

from dataclasses import dataclass

from engine.types import AdapterRef

_SWEEP_ABOVE = 1024  # entries; expired ones are looked for only then


@dataclass(frozen=True, slots=True)
class Quarantined:
    code: str
    message: str
    until_ms: float
    nbytes: int | None = None  # of one that is too large for its tenant's limit

    def fits_into(self, most: int | None) -> bool:
        """Whether size alone was the fault, and a limit of `most` bytes is none any more."""
        return self.nbytes is not None and (most is None or self.nbytes <= most)


class Quarantine:
    def __init__(self) -> None:
        self._entries: dict[AdapterRef, Quarantined] = {}

    def put(self, ref: AdapterRef, entry: Quarantined, now_ms: float) -> None:
        if len(self._entries) > _SWEEP_ABOVE:
            self._entries = dict(self.active(now_ms))
        self._entries[ref] = entry

    def get(self, ref: AdapterRef, now_ms: float) -> Quarantined | None:
        """Why the adapter is refused now, or None."""
        entry = self._entries.get(ref)
        if entry is not None and entry.until_ms <= now_ms:
            del self._entries[ref]
            return None
        return entry

    def lift(self, ref: AdapterRef) -> None:
        self._entries.pop(ref, None)

    def active(self, now_ms: float) -> list[tuple[AdapterRef, Quarantined]]:
        return [item for item in self._entries.items() if item[1].until_ms > now_ms]
