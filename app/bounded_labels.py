"""Label values for tenants and adapters whose number is bounded: a place for each of N, then other.

A value that has a place keeps it while the process lives, so every series only ever grows and all
of them together equal the total. Half of the places go to whoever comes first; the other half to
those of the rest that turn out to be busy, so a heavy latecomer is seen too.
"""

from collections import Counter

OTHER = "other"
NONE = "none"
BUSY_SHARE = 0.02
"""The part of all traffic without a place that earns one."""
WATCHED_FACTOR = 4
SETTLED_AFTER = 50
"""Events without a place before shares are looked at."""


class BoundedLabels:
    """At most `places` values have a label of their own."""

    def __init__(self, places: int) -> None:
        self.places = places
        self._placed: set[str] = set()
        self._watched: Counter[str] = Counter()
        self._others = 0

    def label(self, value: str | None) -> str:
        """The label for one event of `value`; `none` for None."""
        if value is None:
            return NONE
        if value in self._placed:
            return value
        if len(self._placed) < (self.places + 1) // 2:
            self._placed.add(value)
            return value
        if len(self._placed) >= self.places:
            return OTHER
        return value if self._has_earned_a_place(value) else OTHER

    def _has_earned_a_place(self, value: str) -> bool:
        self._others += 1
        self._watched[value] += 1
        if len(self._watched) > WATCHED_FACTOR * self.places:
            self._forget_the_least()
        if self._others < SETTLED_AFTER or self._watched[value] < BUSY_SHARE * self._others:
            return False
        self._placed.add(value)
        del self._watched[value]
        return True

    def _forget_the_least(self) -> None:
        """Halves the list, so that it stays bounded whatever names come."""
        kept = self._watched.most_common(len(self._watched) // 2)
        self._watched = Counter(dict(kept))
