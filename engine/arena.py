"""The one byte arena as fixed extents: KV blocks from the low end, adapters from the top.

Every KV block lies below every adapter. There is no fixed boundary: KV may grow up to the lowest
adapter, adapters may grow down to the highest KV block. A hold keeps a window for one adapter
that could not be placed: nobody else is given an extent inside it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

_FREE, _KV, _ADAPTER = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive extents [first, end)."""

    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count

    def overlaps(self, other: "Span") -> bool:
        return self.first < other.end and other.first < self.end


class Arena:
    """Who owns which extent. Sizes are counted in extents."""

    def __init__(self, extents: int) -> None:
        self.extents = extents
        self._owner = bytearray(extents)
        self._spans: dict[int, Span] = {}  # by adapter slot
        self._hold: Span | None = None
        self._kv_limit = extents
        self._kv_free = extents  # free extents below the limit
        self._kv_used = 0
        self._hint = 0  # no extent below it is free
        self._adapter_used = 0

    # ------------------------------------------------------------------ KV blocks

    @property
    def kv_limit(self) -> int:
        """Blocks at or above it are not given out."""
        return self._kv_limit

    @property
    def kv_free(self) -> int:
        """Extents that can become KV blocks as things stand."""
        return self._kv_free

    @property
    def kv_used(self) -> int:
        return self._kv_used

    def take_block(self) -> int | None:
        """The lowest free extent as a KV block, or None."""
        block = self._owner.find(_FREE, self._hint, self._kv_limit)
        if block < 0:
            return None
        self._owner[block] = _KV
        self._hint = block + 1
        self._kv_free -= 1
        self._kv_used += 1
        return block

    def give_block(self, block: int) -> None:
        if self._owner[block] != _KV:
            raise ValueError(f"extent {block} is not a KV block")
        self._owner[block] = _FREE
        self._hint = min(self._hint, block)
        self._kv_used -= 1
        if block < self._kv_limit:
            self._kv_free += 1

    def kv_in(self, window: Span) -> int:
        """KV blocks inside a window."""
        return self._owner.count(_KV, window.first, window.end)

    # ------------------------------------------------------------------ adapters

    @property
    def adapter_used(self) -> int:
        return self._adapter_used

    def span(self, slot: int) -> Span:
        return self._spans[slot]

    def spans(self) -> dict[int, Span]:
        return dict(self._spans)

    def has_hole(self, count: int, kv_spare: int) -> bool:
        """Whether `place` would succeed and take at most `kv_spare` extents from KV's reach."""
        return any(
            hole.count >= count and (hole.end != self._kv_limit or count <= kv_spare)
            for hole in self._holes()
        )

    def place(self, slot: int, count: int) -> Span | None:
        """The highest hole of `count` free extents, or None."""
        for hole in self._holes():
            if hole.count >= count:
                return self._put(slot, Span(hole.end - count, count))
        return None

    def release(self, slot: int) -> None:
        span = self._spans.pop(slot)
        self._owner[span.first : span.end] = bytes(span.count)
        self._adapter_used -= span.count
        self._set_limit()

    def compact(self, movable: Callable[[int], bool]) -> list[tuple[int, int]]:
        """Moves adapters up into holes: (slot, new first extent), to be carried out in order.

        A move may overlap the adapter's own old place, never anything else's.
        """
        moves: list[tuple[int, int]] = []
        if not any(hole.first > self._kv_limit for hole in self._holes()):
            return moves
        for slot, span in sorted(self._spans.items(), key=lambda item: -item[1].first):
            if not movable(slot):
                continue
            self.release(slot)
            hole = next((h for h in self._holes() if h.count >= span.count), None)
            first = span.first if hole is None else max(span.first, hole.end - span.count)
            self._put(slot, Span(first, span.count))
            if first != span.first:
                moves.append((slot, first))
        return moves

    # ------------------------------------------------------------------ the hold

    @property
    def held(self) -> Span | None:
        return self._hold

    def hold(self, window: Span) -> None:
        """Keeps `window` for one adapter; what lies in it stays until it is released."""
        self._hold = window
        self._set_limit()

    def release_hold(self) -> None:
        self._hold = None
        self._set_limit()

    def place_held(self, slot: int) -> Span | None:
        """Fills the held window once it is free, or None while it is not."""
        window = self._hold
        if window is None or any(self._owner[window.first : window.end]):
            return None
        self._hold = None
        return self._put(slot, window)

    # ------------------------------------------------------------------ inside

    def _put(self, slot: int, span: Span) -> Span:
        self._spans[slot] = span
        self._owner[span.first : span.end] = bytes([_ADAPTER]) * span.count
        self._adapter_used += span.count
        self._set_limit()
        return span

    def _holes(self) -> Iterator[Span]:
        """Runs of free extents above the highest KV block and outside the hold, highest first."""
        bottom = self._owner.rfind(_KV) + 1
        taken = list(self._spans.values())
        if self._hold is not None:
            taken.append(self._hold)  # may overlap adapters that have still to leave it
        taken.sort(key=lambda span: -span.end)
        top = self.extents
        for span in taken:
            first = max(span.end, bottom)
            if top > first:
                yield Span(first, top - first)
            top = min(top, span.first)
        if top > bottom:
            yield Span(bottom, top - bottom)

    def _set_limit(self) -> None:
        lowest = min((span.first for span in self._spans.values()), default=self.extents)
        if self._hold is not None:
            lowest = min(lowest, self._hold.first)
        self._kv_limit = lowest
        self._kv_free = self._owner.count(_FREE, 0, lowest)
        self._hint = 0
