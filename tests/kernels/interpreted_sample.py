"""Drawing on the device under Triton's interpreter, against the plain reference."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.draws import Draw
from engine.kernels import sample_triton
from tests.kernels.sample_cases import ASKED, SampleCase, broken_logits, mismatches
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
    assert mismatches(sample_triton, name, 4, 9000) == 0


def test_rows_without_a_token_to_draw_say_so():
    logits, asked, expected = broken_logits()
    assert sample_triton.sample(logits, asked).tolist() == expected


def test_no_rows():
    assert sample_triton.sample(torch.zeros(0, 50), torch.zeros(0, 5)).shape == (0,)


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-24])
@pytest.mark.parametrize("top_k", [0, 7])
def test_the_first_and_the_last_number_draw_a_token_that_may_be_drawn(number, top_k):
    asked = Draw(number=number, temperature=0.125, top_k=top_k, top_p=1.0, min_p=0.0)
    case = SampleCase(vocab=64, rows=(("usual", asked),) * 3)
    logits = case.logits()
    tokens = sample_triton.sample(logits, case.asked())
    assert torch.isfinite(logits.gather(1, tokens[:, None])).all()


@given(case=sample_cases(), block=st.sampled_from([64, 4096]))
@SWEEP
def test_any_rows_draw_what_the_reference_draws(case, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_triton, "BLOCK", block)
        assert case.wrong(sample_triton) == []


@pytest.mark.wide
@given(case=sample_cases(max_rows=4, max_vocab=4000), block=st.sampled_from([512, 4096]))
@settings(SWEEP, max_examples=20)
def test_any_rows_of_large_vocabularies_draw_what_the_reference_draws(case, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_triton, "BLOCK", block)
        assert case.wrong(sample_triton) == []
