"""Weighted aliases: which targets are allowed, and who gets which."""

from collections import Counter

import pytest

from app.adapters.aliases import Target, check_weights, pick
from app.errors import InvalidRequest


@pytest.mark.parametrize("weights", [[(1, 100)], [(3, 90), (4, 10)], [(n, 20) for n in range(5)]])
def test_weights_that_sum_to_a_hundred_are_allowed(weights: list[tuple[int, int]]) -> None:
    check_weights(weights)


@pytest.mark.parametrize(
    "weights",
    [
        [],
        [(1, 99)],
        [(1, 60), (2, 60)],
        [(1, 100), (2, 0)],
        [(1, 150), (2, -50)],
        [(1, 50), (1, 50)],
        [(n, 10) for n in range(10)],
    ],
)
def test_others_are_refused_by_name(weights: list[tuple[int, int]]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_weights(weights)
    assert refused.value.param == "targets"


TARGETS = [Target("old", 90), Target("new", 10)]


def test_a_request_always_gets_the_same_target() -> None:
    assert {pick(TARGETS, "req_1").version_id for _ in range(20)} == {
        pick(TARGETS, "req_1").version_id
    }


def test_requests_are_shared_out_by_weight() -> None:
    counts = Counter(pick(TARGETS, f"req_{n}").version_id for n in range(10_000))
    assert 800 < counts["new"] < 1200
    assert counts["old"] + counts["new"] == 10_000
