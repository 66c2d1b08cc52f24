"""Drawing on the device compiled for GPUs that are not here."""

import pytest

from engine.kernels.compile import Binary, compile_kernel
from engine.kernels.sample_triton import BLOCK, WARPS, sample_rows

TYPES = {
    "logits_ptr": "*fp32",
    "asked_ptr": "*fp32",
    "tokens_ptr": "*i64",
    **dict.fromkeys(("logits_stride", "vocab", "deepest"), "i32"),
}


def compile_sample(capability: int) -> Binary:
    return compile_kernel(
        sample_rows,
        TYPES,
        {"BLOCK": BLOCK},
        capability=capability,
        warps=WARPS,
        stages=1,
        divisible=frozenset({"logits_stride", "vocab"}),
    )


@pytest.mark.parametrize("capability", [80, 90])
def test_it_compiles_without_spills(capability):
    binary = compile_sample(capability)
    assert binary.faults(capability, multiplies=False) == []
    assert binary.count("LDG.E.128") > 0
