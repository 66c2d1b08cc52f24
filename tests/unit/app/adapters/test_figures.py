"""Figures about behaviour: divergence, loops, cost."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.adapters.figures import (
    all_finite,
    divergence_nats,
    loops,
    mean_divergence_nats,
    per_token_ms,
)
from engine.types import TokenLogprobs


def entry(probabilities: np.ndarray, k: int) -> TokenLogprobs:
    """What an engine says of one position: token 0 was forced, and the k most likely."""
    order = np.argsort(-probabilities)[:k]
    top = [(int(i), float(np.log(probabilities[i]))) for i in order]
    return TokenLogprobs(0, float(np.log(probabilities[0])), top)


def distribution(seed: int, size: int = 50) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(size=size) * 2
    exponentials = np.exp(logits)
    return np.asarray(exponentials / exponentials.sum())


@given(st.integers(0, 500))
def test_two_models_that_agree_are_zero_apart(seed: int) -> None:
    p = entry(distribution(seed), 20)
    assert divergence_nats(p, p) == pytest.approx(0, abs=1e-9)


@given(st.integers(0, 500), st.integers(0, 500))
def test_with_every_token_named_it_is_the_kl_divergence(a: int, b: int) -> None:
    p, q = distribution(a, 20), distribution(b, 20)
    exact = float((p * np.log(p / q)).sum())
    assert divergence_nats(entry(p, 20), entry(q, 20)) == pytest.approx(exact, abs=1e-6)


@given(st.integers(0, 500), st.integers(0, 500))
def test_from_the_top_tokens_alone_it_is_never_negative_and_finite(a: int, b: int) -> None:
    found = divergence_nats(entry(distribution(a), 20), entry(distribution(b), 20))
    assert 0 <= found < 100


def test_models_that_name_no_token_in_common_are_far_apart() -> None:
    base = TokenLogprobs(1, math.log(0.9), [(1, math.log(0.9))])
    other = TokenLogprobs(2, math.log(0.99), [(2, math.log(0.99))])
    assert divergence_nats(base, other) > 2


def test_the_mean_of_nothing_is_not_a_number_but_none() -> None:
    assert mean_divergence_nats([], []) is None


@pytest.mark.parametrize("tokens", [[1] * 16, [9, 8, 1, 2, 3] + [1, 2, 3] * 5, list(range(16)) * 4])
def test_a_phrase_over_and_over_is_a_loop(tokens: list[int]) -> None:
    assert loops(tokens)


@pytest.mark.parametrize("tokens", [[], [1] * 15, list(range(100)), [1] * 40 + [2], [1, 2, 3] * 3])
def test_a_few_repeats_are_not(tokens: list[int]) -> None:
    assert not loops(tokens)


def test_a_ruled_out_token_is_a_number_and_nan_is_not() -> None:
    assert all_finite([TokenLogprobs(1, -0.1, [(2, -math.inf)])])
    assert not all_finite([TokenLogprobs(1, math.nan, [])])
    assert not all_finite([TokenLogprobs(1, -math.inf, [])])
    assert not all_finite([TokenLogprobs(1, -0.1, [(2, math.nan)])])


def test_a_tokens_cost_leaves_the_first_one_out() -> None:
    assert per_token_ms(110.0, 10.0, 11) == 10.0
    assert per_token_ms(110.0, 10.0, 1) is None
    assert per_token_ms(110.0, None, 5) is None
