"""A span's pieces cover it once, and calendar months are those of UTC."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from app.usage.spans import EPOCH, month_starts, next_month, pieces

moments = st.datetimes(datetime(2026, 3, 1), datetime(2026, 4, 30), timezones=st.just(UTC))
whole_hours = moments.map(lambda at: at.replace(minute=0, second=0, microsecond=0))


@given(moments | whole_hours, moments | whole_hours, st.sampled_from(["hour", "day", "month"]))
def test_pieces_tile_the_span_with_whole_units(one, other, bucket):
    start, end = min(one, other), max(one, other)
    found = pieces(start, end, bucket)
    assert [piece.start for piece in found[1:]] == [piece.end for piece in found[:-1]]
    if start < end:
        assert (found[0].start, found[-1].end) == (start, end)
    unit = {"daily": timedelta(days=1), "hourly": timedelta(hours=1)}
    for piece in found:
        if piece.source != "ledger":
            assert (piece.start - EPOCH) % unit[piece.source] == timedelta(0)
            assert (piece.end - EPOCH) % unit[piece.source] == timedelta(0)
        else:
            assert piece.end - piece.start <= timedelta(hours=2)
    assert bucket != "hour" or all(piece.source != "daily" for piece in found)


def test_by_minute_only_the_ledger_is_fine_enough():
    start = datetime(2026, 3, 1, tzinfo=UTC)
    found = pieces(start, start + timedelta(hours=6), "minute")
    assert [piece.source for piece in found] == ["ledger"]


def test_months_begin_at_midnight_utc_whatever_clocks_are_put_forward():
    starts = month_starts(
        datetime(2026, 2, 28, 23, 59, tzinfo=UTC), datetime(2027, 1, 1, tzinfo=UTC)
    )
    assert [(at.month, at.day, at.hour) for at in starts] == [(m, 1, 0) for m in range(2, 13)]
    assert next_month(datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC)) == datetime(
        2027, 1, 1, tzinfo=UTC
    )
