"""How many adapter bytes may be moved between two steps, so that nobody's tokens wait for it.

On the CPU a copy is part of the step loop: its speed is measured, and it gets a small share of a
step's time. Where copies run beside the steps (CUDA) they take no time here, and the setting is the
only bound.
"""

from collections import OrderedDict

COPY_SHARE = 0.1
"""Of a step's duration, what copies may add to it. With less, the usual adapter of a small model
takes two steps, and every request that waits for one a step more."""
MEMORY = 0.1
LEAST_BYTES = 1 << 18
"""What is always moved: a copy must get on."""


class CopyPace:
    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._left: OrderedDict[int, int] = OrderedDict()  # bytes by slot, in the order of start
        self._ms_per_byte = 0.0

    def started(self, slot: int, nbytes: int) -> None:
        self._left[slot] = nbytes

    def dropped(self, slot: int) -> None:
        self._left.pop(slot, None)

    @property
    def left_bytes(self) -> int:
        """Bytes of the copies under way that have still to be moved."""
        return sum(self._left.values())

    def bytes_now(self, step_ms: float) -> int:
        """Beside steps of this length; the setting while no speed was measured."""
        if self._ms_per_byte <= 0.0 or step_ms <= 0.0:
            return self._most_bytes
        fits = int(COPY_SHARE * step_ms / self._ms_per_byte)
        return min(self._most_bytes, max(LEAST_BYTES, fits))

    def moved(self, at_most: int, took_ms: float) -> None:
        """Copies were moved on, oldest first, by what was left and at most `at_most` bytes."""
        total = 0
        for slot, left in list(self._left.items()):
            count = min(left, at_most - total)
            total += count
            self._left[slot] = left - count
            if count == left:
                del self._left[slot]
        if total:
            seen = took_ms / total
            rate = MEMORY if self._ms_per_byte else 1.0
            self._ms_per_byte += rate * (seen - self._ms_per_byte)
