"""The control plane's only source of time."""

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    def now(self) -> datetime:
        """The current time, aware, in UTC."""
        ...

    def monotonic_ms(self) -> float:
        """Milliseconds on a monotonic clock; only differences mean anything."""
        ...


class SystemClock:
    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic_ms(self) -> float:
        return time.monotonic() * 1000.0


class FrozenClock:
    """A clock that moves only when told to."""

    def __init__(self, at: datetime) -> None:
        self.at = at
        self._monotonic_ms = 0.0

    def now(self) -> datetime:
        return self.at

    def monotonic_ms(self) -> float:
        return self._monotonic_ms

    def advance(self, *, seconds: float) -> None:
        from datetime import timedelta

        self.at += timedelta(seconds=seconds)
        self._monotonic_ms += seconds * 1000.0
