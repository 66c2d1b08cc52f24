"""The torch face of drawing tokens against the plain reference."""

import pytest

from engine.kernels import sample
from tests.kernels.sample_cases import ASKED, broken_logits, mismatches


@pytest.mark.parametrize("name", ASKED)
def test_a_row_draws_what_the_reference_draws(name):
    # torch.topk says nothing of the order of equal tokens
    assert mismatches(sample, name, 100, 500, ties=not (ASKED[name] or {}).get("top_k")) == 0


def test_rows_without_a_token_to_draw_say_so():
    logits, asked, expected = broken_logits()
    assert sample.sample(logits, asked).tolist() == expected


def test_what_rows_ask_for_is_one_small_table():
    assert sample.parameters([None]).tolist() == [[0, 0, 0, 1, 0]]
    assert sample.parameters([]).shape == (0, 5)
