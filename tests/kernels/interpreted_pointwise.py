"""The pointwise Triton kernels under Triton's interpreter, against the plain reference."""

import pytest
import torch

from engine.kernels import pointwise_triton
from tests.kernels.pointwise_cases import (
    ROTARY_CASES,
    ROW_CASES,
    assert_rotary_matches,
    assert_rows_match,
)


@pytest.mark.parametrize(("rows", "width", "dtype"), ROW_CASES)
def test_norms_and_gates_are_right(rows, width, dtype):
    assert_rows_match(rows, width, dtype, pointwise_triton)


@pytest.mark.parametrize("case", ROTARY_CASES, ids=str)
def test_heads_are_rotated_and_written_where_they_belong(case):
    assert_rotary_matches(case, pointwise_triton)


def test_a_head_of_another_size_is_refused():
    with pytest.raises(ValueError, match="power of two"):
        pointwise_triton.rotate_and_write(*[torch.zeros(1, 96)] * 6, heads=1)
