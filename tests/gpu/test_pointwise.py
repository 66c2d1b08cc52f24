"""Norms, rotary with KV write and gating on a GPU against the plain reference."""

import pytest
import torch

from engine.kernels import pointwise
from tests.kernels.pointwise_cases import (
    ROTARY_CASES,
    ROW_CASES,
    assert_rotary_matches,
    assert_rows_match,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("rows", "width", "dtype"), [*ROW_CASES, (300, 4096, torch.bfloat16)])
def test_norms_and_gates_are_right(rows, width, dtype):
    assert_rows_match(rows, width, dtype, pointwise, "cuda")


@pytest.mark.parametrize("case", ROTARY_CASES, ids=str)
def test_heads_are_rotated_and_written_where_they_belong(case):
    assert_rotary_matches(case, pointwise, "cuda")
