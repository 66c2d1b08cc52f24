"""The written rule: in any 60 seconds at most the limit, and the announced wait is enough."""

from hypothesis import given
from hypothesis import strategies as st

from app.limits import window

LIMIT = 10


class Replay:
    """Admits calls by the rule, on a clock in milliseconds."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}
        self.admitted: list[tuple[int, int]] = []  # (ms, units)

    def ask(self, now_ms: int, amount: int) -> int:
        self.slots = window.live(self.slots, now_ms)
        wait = window.wait_ms(self.slots, amount, LIMIT, now_ms)
        if wait == 0:
            second = now_ms // 1000
            self.slots[second] = self.slots.get(second, 0) + amount
            self.admitted.append((now_ms, amount))
        return wait


calls = st.lists(st.tuples(st.integers(0, 20_000), st.integers(1, LIMIT)), min_size=1, max_size=40)


@given(calls)
def test_no_sixty_seconds_see_more_than_the_limit(gaps_and_amounts):
    replay, now_ms = Replay(), 0
    for gap_ms, amount in gaps_and_amounts:
        now_ms += gap_ms
        replay.ask(now_ms, amount)
    for start_ms, _ in replay.admitted:
        within = sum(
            units for at_ms, units in replay.admitted if start_ms <= at_ms < start_ms + 60_000
        )
        assert within <= LIMIT


@given(calls)
def test_who_waits_as_told_is_admitted(gaps_and_amounts):
    replay, now_ms = Replay(), 0
    for gap_ms, amount in gaps_and_amounts:
        now_ms += gap_ms
        wait = replay.ask(now_ms, amount)
        if wait:
            now_ms += wait
            assert replay.ask(now_ms, amount) == 0


def test_an_idle_minute_gives_the_whole_limit_back():
    replay = Replay()
    assert replay.ask(500, LIMIT) == 0
    assert replay.ask(60_000, 1) == 1001  # second 0 counts until second 61 begins
    assert replay.ask(61_001, LIMIT) == 0


def test_reset_is_when_the_newest_units_are_forgotten():
    assert window.reset_ms({}, 5_000) == 0
    assert window.reset_ms({1: 2, 4: 1}, 5_000) == (4 + 61) * 1000 - 5_000 + 1
