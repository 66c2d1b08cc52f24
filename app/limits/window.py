"""The written rule of a rate limit, as arithmetic on one-second slots.

In any 60 seconds at most `limit` units are admitted. What is admitted in second s counts until
second s + 61 begins, so that no placement of the 60 seconds can see more; a settlement changes
the slot in which the reservation was made.
"""

from collections.abc import Mapping

WINDOW_SECONDS = 60


def expired_before(now_ms: float) -> int:
    """Slots below this second no longer count."""
    return int(now_ms // 1000) - WINDOW_SECONDS


def live(slots: Mapping[int, int], now_ms: float) -> dict[int, int]:
    """The slots that still count."""
    oldest = expired_before(now_ms)
    return {second: units for second, units in slots.items() if second >= oldest and units > 0}


def wait_ms(slots: Mapping[int, int], amount: int, limit: int, now_ms: float) -> int:
    """How long until `amount` fits, if nothing else is admitted meanwhile; 0: it fits now.

    `amount` must not exceed `limit`: such a call never fits and is refused before.
    """
    used = sum(slots.values())
    if used + amount <= limit:
        return 0
    for second in sorted(slots):
        used -= slots[second]
        if used + amount <= limit:
            return _until_gone(second, now_ms)
    return WINDOW_SECONDS * 1000


def reset_ms(slots: Mapping[int, int], now_ms: float) -> int:
    """How long until nothing counts any more."""
    return _until_gone(max(slots), now_ms) if slots else 0


def _until_gone(second: int, now_ms: float) -> int:
    return max(1, int((second + WINDOW_SECONDS + 1) * 1000 - now_ms) + 1)
