"""What this process itself has admitted: told to the shared store again when that forgot it."""

from collections.abc import Iterator, Mapping

from app.limits.store import Claim
from app.limits.window import WINDOW_SECONDS


class Mirror:
    """Units by window and second, net of settlements, and the seats of running calls."""

    def __init__(self) -> None:
        self._seconds: dict[int, dict[tuple[str, str], int]] = {}
        self._seats: dict[str, list[tuple[str, str]]] = {}

    def take(self, claim: Claim, second: int) -> None:
        """The store admitted the claim in that second of its clock."""
        if second not in self._seconds:
            self._forget_before(second - WINDOW_SECONDS)
        units = self._seconds.setdefault(second, {})
        for taken in claim.windows:
            key = (claim.group, taken.key)
            units[key] = units.get(key, 0) + taken.amount
        if claim.seats:
            self._seats[claim.request_id] = [(claim.group, seat.key) for seat in claim.seats]

    def settle(self, claim: Claim, second: int, unused: tuple[int, ...]) -> None:
        """What a claim did not use, as far as it still counts; its seats are free."""
        units = self._seconds.get(second)
        if units is not None:
            for taken, given_back in zip(claim.windows, unused, strict=True):
                key = (claim.group, taken.key)
                units[key] = max(0, units.get(key, 0) - given_back)
        self._seats.pop(claim.request_id, None)

    def entries(self) -> Iterator[tuple[str, str, int, int]]:
        """(group, window, second, units) of everything that may still count."""
        for second, units in self._seconds.items():
            for (group, key), amount in units.items():
                if amount:
                    yield group, key, second, amount

    @property
    def seats(self) -> Mapping[str, list[tuple[str, str]]]:
        """Request id -> (group, seat) of every call that runs."""
        return self._seats

    def _forget_before(self, second: int) -> None:
        for old in [known for known in self._seconds if known < second]:
            del self._seconds[old]
