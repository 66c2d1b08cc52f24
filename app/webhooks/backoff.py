"""When a delivery that failed is tried again: after 10 s, then three times as long each time."""

import hashlib
from datetime import datetime, timedelta

FIRST_S = 10.0
FACTOR = 3.0
JITTER = 0.2


def next_attempt(
    delivery_id: str, attempts: int, now: datetime, give_up_at: datetime
) -> datetime | None:
    """After `attempts` failures; None when the last one was made. The last is at `give_up_at`.

    Up to a fifth is added, by the delivery's id, so that an endpoint that comes back is not met
    by everything at once.
    """
    if now >= give_up_at:
        return None
    digest = hashlib.blake2b(f"{delivery_id}:{attempts}".encode(), digest_size=4).digest()
    share = int.from_bytes(digest, "big") / 2**32
    delay_s = FIRST_S * FACTOR ** min(attempts - 1, 20) * (1 + JITTER * share)
    return min(now + timedelta(seconds=delay_s), give_up_at)
