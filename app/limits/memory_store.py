"""Limits inside one process. Each operation runs between two awaits, so it is atomic."""

from collections import defaultdict

from app.clock import Clock
from app.limits import window
from app.limits.store import Claim, Decision, Level, SeatLevel

SEAT_WAIT_MS = 1000
"""A seat is free when a call ends, which nobody can foretell: come back after a second."""


class MemoryLimitStore:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._slots: defaultdict[str, dict[int, int]] = defaultdict(dict)
        self._seats: defaultdict[str, dict[str, float]] = defaultdict(dict)

    async def start(self) -> None:
        return

    def problem(self) -> str | None:
        return None

    async def reserve(self, claim: Claim, lease_ms: int) -> Decision:
        now_ms = self._clock.monotonic_ms()
        second = int(now_ms // 1000)
        refusal = self._refusal(claim, now_ms)
        if refusal is not None:
            return self._decision(claim, now_ms, *refusal)
        for taken in claim.windows:
            slots = self._slots[taken.key]
            slots[second] = slots.get(second, 0) + taken.amount
        for seat in claim.seats:
            self._seats[seat.key][claim.request_id] = now_ms + lease_ms
        return self._decision(claim, now_ms)

    async def peek(self, claim: Claim) -> Decision:
        now_ms = self._clock.monotonic_ms()
        return self._decision(claim, now_ms)

    async def settle(self, claim: Claim, slot: int, unused: tuple[int, ...]) -> None:
        for taken, units in zip(claim.windows, unused, strict=True):
            slots = self._slots.get(taken.key)
            if slots is not None and slot in slots:
                slots[slot] = max(0, slots[slot] - units)
        for seat in claim.seats:
            self._seats[seat.key].pop(claim.request_id, None)

    async def renew(self, seats: list[tuple[str, str]], lease_ms: int) -> None:
        until = self._clock.monotonic_ms() + lease_ms
        for key, request_id in seats:
            if request_id in self._seats[key]:
                self._seats[key][request_id] = until

    async def close(self) -> None:
        self._slots.clear()
        self._seats.clear()

    def _live(self, key: str, now_ms: float) -> dict[int, int]:
        slots = window.live(self._slots.get(key, {}), now_ms)
        if slots:
            self._slots[key] = slots
        else:
            self._slots.pop(key, None)
        return slots

    def _live_seats(self, key: str, now_ms: float) -> dict[str, float]:
        seats = {id_: until for id_, until in self._seats.get(key, {}).items() if until > now_ms}
        self._seats[key] = seats
        return seats

    def _refusal(self, claim: Claim, now_ms: float) -> tuple[str, int] | None:
        """The name of the limit that has no room, and the wait that makes room in all windows."""
        name, longest = None, 0
        for taken in claim.windows:
            slots = self._live(taken.key, now_ms)
            needed = window.wait_ms(slots, taken.amount, taken.limit, now_ms)
            if needed > longest:
                name, longest = taken.name, needed
        if name is not None:
            return name, longest
        if any(len(self._live_seats(s.key, now_ms)) >= s.limit for s in claim.seats):
            return "concurrency", SEAT_WAIT_MS
        return None

    def _decision(
        self, claim: Claim, now_ms: float, refused_by: str | None = None, wait_ms: int = 0
    ) -> Decision:
        seats = tuple(
            SeatLevel(seat.key, seat.limit, len(self._live_seats(seat.key, now_ms)))
            for seat in claim.seats
        )
        levels = self._levels(claim, now_ms)
        return Decision(int(now_ms // 1000), levels, seats, refused_by, wait_ms)

    def _levels(self, claim: Claim, now_ms: float) -> tuple[Level, ...]:
        levels = []
        for taken in claim.windows:
            slots = self._live(taken.key, now_ms)
            levels.append(
                Level(
                    name=taken.name,
                    limit=taken.limit,
                    used=sum(slots.values()),
                    reset_ms=window.reset_ms(slots, now_ms),
                )
            )
        return tuple(levels)
