"""One target's requests as figures."""

import pytest

from app.adapters.target_figures import latencies, lengths, ms_per_token, percentile, target_figures
from app.usage.target_repository import AnsweredRequest


def answered(
    tokens: int = 11, *, reasons: tuple[str, ...] = ("stop",), ttft: float | None = 100.0
) -> AnsweredRequest:
    return AnsweredRequest(tokens, list(reasons), ttft, 300.0)


@pytest.mark.parametrize(("percent", "value"), [(1, 1), (50, 50), (95, 95), (99, 99), (100, 100)])
def test_a_percentile_is_a_value_that_was_measured(percent: int, value: int) -> None:
    assert percentile(list(range(1, 101)), percent) == value


def test_a_percentile_of_one_value_is_that_value() -> None:
    assert [percentile([7.0], percent) for percent in (1, 50, 99)] == [7.0] * 3


def test_the_time_of_a_token_leaves_out_the_first() -> None:
    assert ms_per_token(answered(11)) == 20.0


def test_choices_share_the_time_of_their_request() -> None:
    assert ms_per_token(answered(22, reasons=("stop", "length"))) == 20.0


@pytest.mark.parametrize("request_", [answered(1), answered(0), answered(ttft=None)])
def test_an_answer_of_one_token_has_no_time_between_tokens(request_: AnsweredRequest) -> None:
    assert ms_per_token(request_) is None


def test_nothing_measured_is_null_and_not_zero() -> None:
    figures = target_figures(
        version=1, weight=100, state="ready", by_status={"open": 2}, errors={}, answered=[]
    )
    assert (figures.requests, figures.running, figures.error_rate) == (2, 2, None)
    assert (figures.output_tokens, figures.ttft_ms, figures.token_ms) == (None, None, None)


def test_the_error_rate_is_of_what_has_ended() -> None:
    figures = target_figures(
        version=1,
        weight=100,
        state="ready",
        by_status={"open": 10, "completed": 6, "cancelled": 2, "failed": 2},
        errors={"b": 1, "a": 1},
        answered=[answered()] * 6,
    )
    assert (figures.requests, figures.error_rate) == (20, 0.2)
    assert [error.code for error in figures.errors] == ["a", "b"]
    assert figures.finish_reasons == {"stop": 6}


def test_lengths_and_latencies_are_of_all_that_was_measured() -> None:
    found = lengths([1, 2, 3, 4])
    assert found is not None
    assert (found.mean, found.p50, found.p95) == (2.5, 2, 4)
    times = latencies([None, 3.0, 1.0, 2.0])
    assert times is not None
    assert (times.p50, times.p99) == (2.0, 3.0)
