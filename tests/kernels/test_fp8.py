"""The fp8 linear on this CPU against the plain reference."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.fp8_cases import SHAPES, error, error_of_terms

ROUNDED = 8e-3
"""Of the sum of a product's terms: its weights and its result are rounded to bf16, 2^-8 each."""
SWEEP = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_equals_the_reference(shape, dtype):
    assert error(*shape, dtype) < 8e-3


def sizes(largest: int) -> st.SearchStrategy[int]:
    """Odd ones, and those that a scaled product takes."""
    return st.one_of(
        st.integers(1, largest),
        st.integers(1, largest // 16).map(lambda sixteenths: 16 * sixteenths),
    )


def any_case(most_rows: int, largest: int):
    return given(
        rows=st.integers(0, most_rows),
        out=sizes(largest),
        width=sizes(largest),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        by_output=st.booleans(),
        seed=st.integers(0, 99),
    )


@any_case(9, 200)
@SWEEP
def test_any_shape_equals_the_reference(rows, out, width, dtype, by_output, seed):
    assert error_of_terms(rows, out, width, dtype, by_output=by_output, seed=seed) < ROUNDED


@pytest.mark.wide
@any_case(140, 1500)
@settings(SWEEP, max_examples=400)
def test_any_large_shape_equals_the_reference(rows, out, width, dtype, by_output, seed):
    assert error_of_terms(rows, out, width, dtype, by_output=by_output, seed=seed) < ROUNDED
