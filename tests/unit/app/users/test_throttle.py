"""How long a guesser waits: a pure decision."""

from datetime import UTC, datetime, timedelta

import pytest

from app.users.throttle import ACCOUNT, ADDRESS, FORGET_AFTER, told, wait

NOW = datetime(2026, 3, 14, 12, tzinfo=UTC)


def test_the_first_failures_cost_nothing() -> None:
    assert wait(ACCOUNT, ACCOUNT.free - 1, NOW, NOW) == timedelta(0)


def test_then_the_wait_doubles_up_to_its_longest() -> None:
    waits = [wait(ACCOUNT, ACCOUNT.free + n, NOW, NOW) for n in range(12)]
    assert waits[:4] == [timedelta(seconds=s) for s in (1, 2, 4, 8)]
    assert waits[-1] == ACCOUNT.longest
    assert wait(ADDRESS, 10_000, NOW, NOW) == ADDRESS.longest


def test_it_counts_from_the_last_failure() -> None:
    due = wait(ACCOUNT, ACCOUNT.free + 3, NOW, NOW + timedelta(seconds=5))
    assert due == timedelta(seconds=3)
    assert wait(ACCOUNT, ACCOUNT.free + 3, NOW, NOW + timedelta(seconds=9)) == timedelta(0)


def test_old_failures_are_forgotten() -> None:
    assert wait(ADDRESS, 10_000, NOW, NOW + FORGET_AFTER) == timedelta(0)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "1 second"), (64, "64 seconds"), (90.5, "2 minutes"), (300, "5 minutes")],
)
def test_a_wait_is_told_in_words_and_never_too_short(seconds: float, words: str) -> None:
    assert told(timedelta(seconds=seconds)) == words
