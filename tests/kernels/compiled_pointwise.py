"""The pointwise Triton kernels compiled for GPUs that are not here."""

import itertools

import pytest

from engine.kernels.compile import Binary, compile_kernel
from engine.kernels.pointwise_triton import (
    GATE_COLUMNS,
    HEADS_A_PROGRAM,
    gate_rows,
    norm_rows,
    rotate_heads,
    row_warps,
)

STRIDES = frozenset({"x_stride", "y_stride", "update_stride", "qkv_stride", "width", "inner"})
ELEMENTS = ("x_ptr", "y_ptr", "update_ptr", "weight_ptr", "qkv_ptr", "q_ptr", "norm_ptr")
TYPES = {
    **dict.fromkeys(STRIDES, "i32"),
    **dict.fromkeys((*ELEMENTS, "keys_ptr", "values_ptr"), "*bf16"),
    "cos_ptr": "*fp32",
    "sin_ptr": "*fp32",
    "token_rows_ptr": "*i64",
    "eps": "fp32",
}
ROTATE = {
    64: {"HEADS": 9, "KV_HEADS": 3, "HALF": 32, "BLOCK": HEADS_A_PROGRAM},
    128: {"HEADS": 32, "KV_HEADS": 8, "HALF": 64, "BLOCK": HEADS_A_PROGRAM},
}
CASES = {
    "rms_norm 4096": (norm_rows, {"ADD": False, "WIDTH": 4096}, row_warps(4096)),
    "add_rms_norm 4096": (norm_rows, {"ADD": True, "WIDTH": 4096}, row_warps(4096)),
    "add_rms_norm 16384": (norm_rows, {"ADD": True, "WIDTH": 16384}, row_warps(16384)),
    **{
        f"rotate_and_write, heads of {size}{', head norm' * norm}": (
            rotate_heads,
            {**ROTATE[size], "NORM": norm},
            2,
        )
        for size, norm in itertools.product(ROTATE, (False, True))
    },
    "silu_gate": (gate_rows, {"COLUMNS": GATE_COLUMNS}, 4),
}


def compiled(name: str, capability: int) -> Binary:
    kernel, constants, warps = CASES[name]
    return compile_kernel(
        kernel, TYPES, constants, capability=capability, warps=warps, stages=1, divisible=STRIDES
    )


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", CASES)
def test_it_compiles_without_spills(name, capability):
    assert compiled(name, capability).faults(capability, multiplies=False) == []


def test_rows_are_read_in_words_of_16_bytes():
    for name in ("add_rms_norm 4096", "silu_gate"):
        assert compiled(name, 90).count("LDG.E.128") > 0, name
