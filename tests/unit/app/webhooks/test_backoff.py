"""When a delivery is tried again."""

from datetime import UTC, datetime, timedelta

import pytest

from app.webhooks.backoff import LONGEST_ASKED_S, asked_for_s, next_attempt

START = datetime(2026, 3, 14, 12, 0, tzinfo=UTC)
DAY = timedelta(days=1)


def waits(delivery_id: str = "whd_1") -> list[timedelta]:
    """Between the attempts of a delivery that always fails."""
    now, attempts = START, 0
    found = []
    while True:
        attempts += 1
        again = next_attempt(delivery_id, attempts, now, START + DAY)
        if again is None:
            return found
        found.append(again - now)
        now = again


def test_each_wait_is_about_three_times_the_one_before() -> None:
    *growing, _last = waits()
    for n, wait in enumerate(growing):
        assert 10 * 3**n <= wait.total_seconds() <= 12 * 3**n


def test_the_last_attempt_is_a_day_after_the_first() -> None:
    assert sum(waits(), timedelta()) == DAY
    assert 8 <= len(waits()) <= 10


def test_deliveries_of_one_moment_come_back_at_different_ones() -> None:
    firsts = {waits(f"whd_{n}")[0] for n in range(50)}
    assert len(firsts) == 50


@pytest.mark.parametrize(
    ("status", "header", "asked_s"),
    [
        (429, "120", 120),
        (503, " 7 ", 7),
        (503, "Sat, 14 Mar 2026 12:05:00 GMT", 300),
        (503, "Sat, 14 Mar 2026 11:00:00 GMT", 0),
        (429, "999999999999", LONGEST_ASKED_S),
        (429, "Sat, 14 Mar 2099 11:00:00 GMT", LONGEST_ASKED_S),
        *((429, nonsense, None) for nonsense in ("", "soon", "-5", "1.5", "٣", "9" * 4000 + "x")),
        (500, "120", None),
        (429, None, None),
    ],
)
def test_a_busy_receiver_may_ask_for_time(
    status: int, header: str | None, asked_s: float | None
) -> None:
    assert asked_for_s(status, header, START) == asked_s


def test_what_it_asks_for_lengthens_a_wait_and_never_shortens_one() -> None:
    usual = next_attempt("whd_1", 1, START, START + DAY)
    assert next_attempt("whd_1", 1, START, START + DAY, 600) == START + timedelta(seconds=600)
    assert next_attempt("whd_1", 1, START, START + DAY, 1) == usual
    soon = START + timedelta(seconds=5)
    assert next_attempt("whd_1", 1, START, soon, 600) == soon
