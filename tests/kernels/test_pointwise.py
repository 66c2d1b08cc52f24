"""The torch face of the pointwise operations against the plain reference."""

import pytest

from engine.kernels import pointwise
from tests.kernels.pointwise_cases import (
    ROTARY_CASES,
    ROW_CASES,
    assert_rotary_matches,
    assert_rows_match,
)


@pytest.mark.parametrize(("rows", "width", "dtype"), ROW_CASES)
def test_norms_and_gates_are_right(rows, width, dtype):
    assert_rows_match(rows, width, dtype, pointwise)


@pytest.mark.parametrize("case", ROTARY_CASES, ids=str)
def test_heads_are_rotated_and_written_where_they_belong(case):
    assert_rotary_matches(case, pointwise)
