"""The fp8 linear on this CPU against the plain reference."""

import pytest
import torch

from tests.kernels.fp8_cases import SHAPES, error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_equals_the_reference(shape, dtype):
    assert error(*shape, dtype) < 8e-3
