"""When a delivery is tried again."""

from datetime import UTC, datetime, timedelta

from app.webhooks.backoff import next_attempt

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
