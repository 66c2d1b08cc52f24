"""Drawing on a GPU against the plain reference."""

import pytest
import torch

from engine.kernels import sample
from tests.kernels.sample_cases import ASKED, broken_logits, mismatches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", ASKED)
def test_a_row_draws_what_the_reference_draws(name):
    # sums of 30,000 weights are rounded: a number within 1e-5 of an edge may fall beside it
    assert mismatches(sample, name, 300, 30_000, "cuda") <= 3


def test_rows_without_a_token_to_draw_say_so():
    logits, asked, expected = broken_logits()
    assert sample.sample(logits.cuda(), asked.cuda()).tolist() == expected
