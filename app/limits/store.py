"""What every limit store does: reserve all of a call's claims at once, or none of them."""

from dataclasses import dataclass
from typing import Protocol

SEAT_LEASE_MS = 60_000
"""A seat that nobody renews for this long is free again: its process died."""


class StoreAway(Exception):
    """The shared counters cannot be had now, so nothing may be admitted."""

    def __init__(self, retry_after_ms: float) -> None:
        super().__init__(f"the limits are away for at least {retry_after_ms:.0f} ms")
        self.retry_after_ms = retry_after_ms


@dataclass(frozen=True, slots=True)
class Window:
    """`amount` units of a limit per minute. `name` is "requests" or "tokens"."""

    name: str
    key: str
    limit: int
    amount: int


@dataclass(frozen=True, slots=True)
class Seat:
    """One of the concurrent requests, held until released or until its lease ends."""

    key: str
    limit: int


@dataclass(frozen=True, slots=True)
class Claim:
    """Everything that one call takes, of its tenant's limits and of its key's.

    `group` is the tenant's id; it begins every key of the claim.
    """

    group: str
    request_id: str
    windows: tuple[Window, ...]
    seats: tuple[Seat, ...] = ()


@dataclass(frozen=True, slots=True)
class Level:
    """Where one window stands after the decision."""

    name: str
    limit: int
    used: int
    reset_ms: int

    @property
    def remaining(self) -> int:
        return max(0, self.limit - self.used)


@dataclass(frozen=True, slots=True)
class SeatLevel:
    """How many seats are taken after the decision."""

    key: str
    limit: int
    used: int

    @property
    def remaining(self) -> int:
        return max(0, self.limit - self.used)


@dataclass(frozen=True, slots=True)
class Decision:
    """`refused_by` is None when admitted, else "requests", "tokens" or "concurrency"."""

    slot: int  # the second in which the units were taken
    levels: tuple[Level, ...]  # in the order of the claim's windows
    seats: tuple[SeatLevel, ...] = ()  # in the order of the claim's seats
    refused_by: str | None = None
    wait_ms: int = 0

    @property
    def admitted(self) -> bool:
        return self.refused_by is None


class LimitStore(Protocol):
    """Shared by every process that serves the tenant (Redis), or by one process (in-process).

    All but `settle`, `start` and `close` may raise StoreAway.
    """

    async def start(self) -> None: ...

    def problem(self) -> str | None:
        """Why nothing can be admitted now, in words; None when it can."""
        ...

    async def reserve(self, claim: Claim, lease_ms: int) -> Decision:
        """Takes every unit and every seat, or nothing, in one atomic step."""
        ...

    async def peek(self, claim: Claim) -> Decision:
        """The levels as they are; takes nothing."""
        ...

    async def settle(self, claim: Claim, slot: int, unused: tuple[int, ...]) -> None:
        """Gives back `unused[i]` units of window i, and the seats. Never raises."""
        ...

    async def renew(self, seats: list[tuple[str, str]], lease_ms: int) -> None:
        """Extends the seats of (seat key, request id)."""
        ...

    async def close(self) -> None: ...
