"""The pointwise Triton kernels under Triton's interpreter, against the plain reference."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.kernels import pointwise_triton
from tests.kernels.pointwise_cases import (
    ROTARY_CASES,
    ROW_CASES,
    assert_rotary_matches,
    assert_rows_match,
)
from tests.kernels.pointwise_strategies import rotary_cases, row_shapes

SWEEP = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@pytest.mark.parametrize(("rows", "width", "dtype"), ROW_CASES)
def test_norms_and_gates_are_right(rows, width, dtype):
    assert_rows_match(rows, width, dtype, pointwise_triton)


@pytest.mark.parametrize("case", ROTARY_CASES, ids=str)
def test_heads_are_rotated_and_written_where_they_belong(case):
    assert_rotary_matches(case, pointwise_triton)


@given(shape=row_shapes(), seed=st.integers(0, 99))
@SWEEP
def test_norms_and_gates_of_any_shape_are_right(shape, seed):
    assert_rows_match(*shape, pointwise_triton, seed=seed)


@pytest.mark.wide
@given(shape=row_shapes(max_rows=20, max_width=5000), seed=st.integers(0, 99))
@settings(SWEEP, max_examples=150)
def test_norms_and_gates_of_any_large_shape_are_right(shape, seed):
    assert_rows_match(*shape, pointwise_triton, seed=seed)


@given(case=rotary_cases())
@settings(SWEEP, max_examples=70)
def test_any_heads_are_rotated_and_written(case):
    assert_rotary_matches(case, pointwise_triton)


@pytest.mark.wide
@given(case=rotary_cases(max_rows=30, max_group=8))
@settings(SWEEP, max_examples=100)
def test_any_heads_of_many_rows_are_rotated_and_written(case):
    assert_rotary_matches(case, pointwise_triton)


def test_a_head_of_another_size_is_refused():
    with pytest.raises(ValueError, match="power of two"):
        pointwise_triton.rotate_and_write(*[torch.zeros(1, 96)] * 6, heads=1)
