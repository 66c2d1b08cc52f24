"""Which tables a span of time is read from: whole days, whole hours, and the ledger for the rest.

The pieces of a span touch, do not overlap and cover it, so no row is counted twice or left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

HOURS_A_DAY = 24
HOUR_S = 3600
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Bucket = Literal["minute", "hour", "day", "month", "all"]
"""`all` is one bucket, the whole span."""
Source = Literal["daily", "hourly", "ledger"]


@dataclass(frozen=True, slots=True)
class Piece:
    """[start, end) from one table; ends on whole days or hours unless it is the ledger's."""

    source: Source
    start: datetime
    end: datetime

    @property
    def hours(self) -> tuple[int, int]:
        """First hour since the epoch, and the one after the last that the piece touches."""
        return hour_number(self.start), hour_number(up_to_hour(self.end))

    @property
    def days(self) -> tuple[int, int]:
        first, end = self.hours
        return first // HOURS_A_DAY, end // HOURS_A_DAY


def pieces(start: datetime, end: datetime, bucket: Bucket) -> list[Piece]:
    """Tiles [start, end), in order of time, with the coarsest tables that the bucket allows."""
    if bucket == "minute":
        return [Piece("ledger", start, end)] if start < end else []
    return [piece for piece in _tile(start, end, days=bucket != "hour") if piece.start < piece.end]


def _tile(start: datetime, end: datetime, *, days: bool) -> Iterator[Piece]:
    first, last = _up(start, HOUR_S), _down(end, HOUR_S)
    if first >= last:
        yield Piece("ledger", start, end)
        return
    yield Piece("ledger", start, first)
    midnight, last_midnight = _up(first, HOUR_S * HOURS_A_DAY), _down(last, HOUR_S * HOURS_A_DAY)
    if days and midnight < last_midnight:
        yield Piece("hourly", first, midnight)
        yield Piece("daily", midnight, last_midnight)
        yield Piece("hourly", last_midnight, last)
    else:
        yield Piece("hourly", first, last)
    yield Piece("ledger", last, end)


def month_starts(start: datetime, end: datetime) -> list[datetime]:
    """Beginnings of the calendar months (UTC) that [start, end) touches."""
    at = start.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    found = []
    while at < end:
        found.append(at)
        at = next_month(at)
    return found


def next_month(at: datetime) -> datetime:
    """The first moment of the following calendar month, in UTC."""
    first = at.astimezone(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return (first + timedelta(days=32)).replace(day=1)


def hour_number(at: datetime) -> int:
    """Hours since the epoch of the hour that `at` lies in."""
    return int((at - EPOCH) // timedelta(hours=1))


def up_to_hour(at: datetime) -> datetime:
    """The hour that begins at or after `at`."""
    return _up(at, HOUR_S)


def _down(at: datetime, unit_s: int) -> datetime:
    seconds = int((at - EPOCH) // timedelta(seconds=unit_s)) * unit_s
    return EPOCH + timedelta(seconds=seconds)


def _up(at: datetime, unit_s: int) -> datetime:
    below = _down(at, unit_s)
    return below if below == at else below + timedelta(seconds=unit_s)
