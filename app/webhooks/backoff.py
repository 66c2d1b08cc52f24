"""When a delivery that failed is tried again: after 10 s, then three times as long each time.

A receiver that is busy may ask for more time (`Retry-After`, RFC 9110), up to an hour.
"""

import hashlib
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

FIRST_S = 10.0
FACTOR = 3.0
JITTER = 0.2
LONGEST_ASKED_S = 3600.0
_BUSY = (429, 503)
_LONGEST_HEADER = 40


def next_attempt(
    delivery_id: str,
    attempts: int,
    now: datetime,
    give_up_at: datetime,
    asked_s: float | None = None,
) -> datetime | None:
    """After `attempts` failures; None when the last one was made. The last is at `give_up_at`.

    Never sooner than the receiver asked for.

    Up to a fifth is added, by the delivery's id, so that an endpoint that comes back is not met
    by everything at once.
    """
    if now >= give_up_at:
        return None
    digest = hashlib.blake2b(f"{delivery_id}:{attempts}".encode(), digest_size=4).digest()
    share = int.from_bytes(digest, "big") / 2**32
    delay_s = FIRST_S * FACTOR ** min(attempts - 1, 20) * (1 + JITTER * share)
    return min(now + timedelta(seconds=max(delay_s, asked_s or 0.0)), give_up_at)


def asked_for_s(status: int, header: str | None, now: datetime) -> float | None:
    """How long a receiver that answered 429 or 503 asks to be left alone: seconds or a date.

    None where it says nothing, or nothing that can be read.
    """
    if status not in _BUSY or header is None:
        return None
    text = header.strip()
    if len(text) > _LONGEST_HEADER:
        return None
    if text.isascii() and text.isdecimal():
        return min(float(text), LONGEST_ASKED_S)
    try:
        at = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return min(max(0.0, (at - now).total_seconds()), LONGEST_ASKED_S)
