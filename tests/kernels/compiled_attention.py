"""The paged attention kernels compiled for GPUs that are not here."""

import pytest
import triton.language as tl

from engine.kernels.attention_triton import LONG, SHORT, attend, merge
from engine.kernels.compile import Binary, compile_kernel
from engine.kernels.paged_work import SPLIT_TOKENS

STRIDES = frozenset({"q_stride", "block_stride"})
TYPES = {
    **dict.fromkeys((*STRIDES, "item_start", "table_start", "merge_start", "window"), "i32"),
    **dict.fromkeys(("q_ptr", "keys_ptr", "values_ptr", "out_ptr"), "*bf16"),
    **dict.fromkeys(("partial_ptr", "partial_stats_ptr"), "*fp32"),
    "work_ptr": "*i32",
    "scale_log2": "fp32",
}
HEADS = {64: {"HEADS": 9, "KV_HEADS": 3, "D": 64}, 128: {"HEADS": 32, "KV_HEADS": 8, "D": 128}}


def compile_attend(name: str, head_dim: int, windowed: bool, capability: int) -> Binary:
    tile = {"short": SHORT, "long": LONG}[name]
    constants = {
        **HEADS[head_dim],
        "COUNT": int(name == "long"),
        "BLOCK_TOKENS": 16,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "SPLIT": SPLIT_TOKENS if name == "short" else 0,
        "WINDOWED": windowed,
        "COMPUTE": tl.bfloat16,
    }
    return compile_kernel(
        attend,
        TYPES,
        constants,
        capability=capability,
        warps=tile.warps,
        stages=tile.stages,
        divisible=STRIDES,
    )


def compile_merge(head_dim: int, capability: int) -> Binary:
    constants = {"HEADS": HEADS[head_dim]["HEADS"], "D": head_dim, "BLOCK": 4}
    return compile_kernel(merge, TYPES, constants, capability=capability, warps=4, stages=3)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("windowed", [False, True], ids=["whole", "window"])
@pytest.mark.parametrize("head_dim", HEADS)
@pytest.mark.parametrize("name", ["short", "long"])
def test_attention_compiles_without_spills_onto_tensor_cores(name, head_dim, windowed, capability):
    binary = compile_attend(name, head_dim, windowed, capability)
    assert binary.faults(capability) == []
    assert sum(
        n for op, n in binary.instructions.items() if op.startswith("LDGSTS") and ".128" in op
    )
    if name == "long" and capability == 90:
        assert binary.count("HGMMA") > 0


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("head_dim", HEADS)
def test_the_merge_compiles_without_spills(head_dim, capability):
    assert compile_merge(head_dim, capability).faults(capability, multiplies=False) == []
