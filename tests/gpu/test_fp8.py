"""The fp8 linear on a GPU against the plain reference."""

import pytest
import torch

from tests.kernels.fp8_cases import SHAPES, error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("shape", [*SHAPES, (300, 1024, 512)], ids=str)
def test_it_equals_the_reference(shape):
    assert error(*shape, torch.bfloat16, "cuda") < 2e-2
