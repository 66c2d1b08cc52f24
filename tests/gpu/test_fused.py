"""The 4-bit linear that adds its rows' adapters, on a GPU against the plain reference."""

import pytest
import torch

from tests.kernels.fused_cases import CASES, FusedCase
from tests.kernels.int4_cases import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LARGE_RANKS = ((8, 16, 64, 4), (0, 256, 1, 0), (33, 0, 7, 16), (64, 64, 64, 64))
LARGE = {
    "prefill of many adapters": FusedCase((*range(8), -1) * 20, LARGE_RANKS * 2, in_features=2048),
    "decode": FusedCase((0, 1, -1, 2, 3, 0) * 5, LARGE_RANKS, in_features=2048),
    "prefill": FusedCase((0,) * 150 + (-1,) * 20 + (1,) * 80, LARGE_RANKS, in_features=2048),
}


@pytest.mark.parametrize("name", [*CASES, *LARGE])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_fused_equals_the_reference_and_leaves_base_rows_alone(name, batch_invariant):
    case = {**CASES, **LARGE}[name]
    fused = case.run(fuse=True, device="cuda", batch_invariant=batch_invariant)
    separate = case.run(fuse=False, device="cuda", batch_invariant=batch_invariant)
    assert relative_error(fused, case.expected()) < 2e-2
    assert relative_error(separate, case.expected()) < 3e-2
    base = torch.tensor([slot < 0 for slot in case.row_slots], dtype=torch.bool)
    assert torch.equal(fused.cpu()[base], separate.cpu()[base])
