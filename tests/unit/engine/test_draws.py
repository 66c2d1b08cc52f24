"""The uniform numbers and the draw from a row's distribution."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.draws import Draw, draw, uniform

ANY_INT = st.integers(-(1 << 70), 1 << 70)


def a_draw(number: float, **options) -> Draw:
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return Draw(number=number, **{**defaults, **options})


def frequencies(logits: torch.Tensor, count: int = 4000, **options) -> np.ndarray:
    """Shares of `count` draws from one row of logits at evenly spread numbers."""
    draws = [a_draw((i + 0.5) / count, **options) for i in range(count)]
    tokens = draw(logits.repeat(count, 1), draws)
    return np.bincount(tokens.numpy(), minlength=logits.numel()) / count


class TestUniform:
    @given(seed=ANY_INT, choice=st.integers(0, 100), position=st.integers(0, 100_000))
    def test_a_number_lies_in_the_unit_interval_and_repeats(self, seed, choice, position):
        number = uniform(seed, choice, position)
        assert 0 <= number < 1
        assert number == uniform(seed, choice, position)

    def test_the_numbers_of_a_sequence_are_spread_evenly(self):
        numbers = [uniform(7, 0, position) for position in range(20_000)]
        counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
        assert abs(counts - 1000).max() < 150  # five standard deviations

    @pytest.mark.parametrize("axis", [0, 1, 2])
    def test_neighbouring_arguments_give_unrelated_numbers(self, axis):
        first = [uniform(*(i if a == axis else 3 for a in range(3))) for i in range(5000)]
        assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.06

    def test_the_numbers_never_change_between_releases(self):
        assert uniform(0, 0, 0) == pytest.approx(0.13870941014555427, abs=0)


class TestDraw:
    def test_shares_follow_the_softmax_of_the_scaled_logits(self):
        logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf])
        expected = torch.softmax(logits / 0.7, dim=-1)
        assert frequencies(logits, temperature=0.7) == pytest.approx(expected.numpy(), abs=1e-3)

    def test_top_k_keeps_exactly_k_even_among_ties(self):
        assert np.count_nonzero(frequencies(torch.zeros(10), top_k=3)) == 3

    def test_top_k_of_one_takes_the_likeliest(self):
        assert frequencies(torch.tensor([0.0, 0.1, 0.05]), top_k=1)[1] == 1

    def test_a_top_k_above_the_vocabulary_keeps_everything(self):
        assert np.count_nonzero(frequencies(torch.zeros(10), top_k=1000)) == 10

    def test_top_p_keeps_the_smallest_set_that_holds_the_mass(self):
        logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
        kept = frequencies(logits, top_p=0.7)
        assert kept == pytest.approx([0.625, 0.375, 0, 0], abs=1e-3)

    def test_a_tiny_top_p_takes_the_likeliest(self):
        assert frequencies(torch.tensor([0.0, 0.1, 0.05]), top_p=1e-9)[1] == 1

    def test_top_p_applies_to_what_top_k_left(self):
        logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
        kept = frequencies(logits, top_k=2, top_p=0.5)
        assert kept == pytest.approx([1, 0, 0, 0], abs=1e-3)

    @pytest.mark.parametrize("options", [{}, {"top_p": 0.999}, {"top_k": 4}])
    def test_min_p_drops_what_is_far_below_the_likeliest(self, options):
        logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
        kept = frequencies(logits, min_p=0.5, **options)
        assert kept == pytest.approx([0.625, 0.375, 0, 0], abs=1e-3)

    @pytest.mark.parametrize("spread", [0.0, 0.001, 1.0, 8.0])
    def test_top_p_is_exact_however_flat_the_distribution(self, spread):
        logits = torch.randn(6000, generator=torch.Generator().manual_seed(0)) * spread
        logits += torch.linspace(0, 1e-3, 6000)  # no ties
        exact = torch.softmax(logits.double(), dim=-1)
        sorted_mass, order = exact.sort(descending=True)
        exact[order[(sorted_mass.cumsum(0) - sorted_mass) >= 0.9]] = 0.0
        numbers = torch.linspace(0, 0.99999, 300, dtype=torch.float64)
        expected = torch.searchsorted(exact.cumsum(0), numbers * exact.sum(), right=True)
        draws = [a_draw(number, top_p=0.9) for number in numbers.tolist()]
        actual = draw(logits.repeat(300, 1), draws)
        assert (actual == expected).double().mean() > 0.98  # fp32 sums may pick a neighbour

    def test_flat_and_steep_rows_of_one_batch_keep_their_own_nucleus(self):
        generator = torch.Generator().manual_seed(0)
        flat, steep = torch.randn(2, 6000, generator=generator) * torch.tensor([[0.01], [8.0]])
        rows = torch.stack([flat, steep, flat, steep])
        draws = [a_draw(number, top_p=0.9) for number in (0.2, 0.4, 0.6, 0.8)]
        together = draw(rows.clone(), draws).tolist()
        alone = [draw(row[None].clone(), [d]).item() for row, d in zip(rows, draws, strict=True)]
        assert together == alone

    @pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.9}])
    def test_the_only_token_left_is_drawn_at_any_number(self, options):
        logits = torch.full((8,), -torch.inf)
        logits[6] = -3.0
        assert frequencies(logits, count=50, **options)[6] == 1

    @pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1e3, 1e30])
    def test_extreme_temperatures_stay_finite(self, temperature):
        shares = frequencies(torch.tensor([80.0, 79.0, -80.0]), temperature=temperature)
        assert shares.sum() == 1
        if temperature < 1:
            assert shares[0] == 1
