"""The engine's only source of time. What decides takes a `Clock`; tests pass a simulated one."""

import time
from typing import Protocol


class Clock(Protocol):
    """Time as the engine sees it."""

    def now_ms(self) -> float:
        """Milliseconds on a monotonic clock; only differences mean anything."""
        ...

    def wall_ms(self) -> int:
        """Milliseconds since the Unix epoch, for what leaves the process (journal, status)."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_ms(self) -> float:
        return time.monotonic() * 1000.0

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000


class SimulatedClock:
    """A clock that moves only when told to."""

    def __init__(self, start_ms: float = 0.0) -> None:
        self._now_ms = start_ms

    def now_ms(self) -> float:
        return self._now_ms

    def wall_ms(self) -> int:
        return int(self._now_ms)

    def advance(self, by_ms: float) -> None:
        self._now_ms += by_ms
