"""Drawing on the device under Triton's interpreter, against the plain reference."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.kernels import sample_triton
from tests.kernels.sample_cases import ASKED, broken_logits, mismatches
from tests.kernels.sample_strategies import sample_cases

SWEEP = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@pytest.mark.parametrize("name", ASKED)
def test_a_row_draws_what_the_reference_draws(name):
    assert mismatches(sample_triton, name, 4, 500) == 0


@pytest.mark.parametrize("name", ["top-p", "all of them"])
def test_a_vocabulary_of_several_blocks(name, monkeypatch):
    monkeypatch.setattr(sample_triton, "BLOCK", 128)
    assert mismatches(sample_triton, name, 2, 500) == 0


@pytest.mark.wide
@pytest.mark.parametrize("name", ASKED)
def test_many_rows_draw_what_the_reference_draws(name):
    assert mismatches(sample_triton, name, 12, 9000) == 0


def test_rows_without_a_token_to_draw_say_so():
    logits, asked, expected = broken_logits()
    assert sample_triton.sample(logits, asked).tolist() == expected


def test_no_rows():
    assert sample_triton.sample(torch.zeros(0, 50), torch.zeros(0, 5)).shape == (0,)


@given(case=sample_cases(), block=st.sampled_from([64, 4096]))
@SWEEP
def test_any_rows_draw_what_the_reference_draws(case, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_triton, "BLOCK", block)
        assert case.wrong(sample_triton) == []


@pytest.mark.wide
@given(case=sample_cases(max_rows=8, max_vocab=9000), block=st.sampled_from([512, 4096]))
@settings(SWEEP, max_examples=80)
def test_any_rows_of_large_vocabularies_draw_what_the_reference_draws(case, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_triton, "BLOCK", block)
        assert case.wrong(sample_triton) == []
