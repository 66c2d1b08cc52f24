"""The Triton kernels of multi-LoRA compiled for GPUs that are not here.

Started by `test_lora_triton.py` without TRITON_INTERPRET.
"""

import pytest
import triton.language as tl

from engine.kernels.compile import Binary, compile_kernel
from engine.kernels.lora_triton import LONG, RANK_TILE, TILES, WHOLE, Tile, expand, shrink

INTEGERS = (
    "x_stride",
    "y_stride",
    "hidden_stride",
    "plane_stride",
    "capacity",
    "modules",
    "in_features",
)
DIVISIBLE = frozenset(INTEGERS) - {"modules"}
TYPES = {
    **dict.fromkeys(INTEGERS, "i32"),
    **dict.fromkeys(("batch_ptr", "rank_ptr", "group_ptr", "tiles_ptr"), "*i32"),
    **dict.fromkeys(("a_ptr", "b_ptr", "tokens_ptr"), "*i64"),
    **dict.fromkeys(("x_ptr", "y_ptr", "weights_ptr"), "*bf16"),
    "hidden_ptr": "*fp32",
    "scale_ptr": "*fp32",
}
CAPABILITIES = [80, 90]


def compile_shrink(tile: Tile, capability: int, slices: int = 3) -> Binary:
    constants = {
        "SLICES": slices,
        "SPLITS": tile.splits,
        "ROWS": tile.rows,
        "RANKS": RANK_TILE,
        "DEPTH": tile.depth,
        "COMPUTE": tl.bfloat16,
    }
    return compile_kernel(
        shrink,
        TYPES,
        constants,
        capability=capability,
        warps=tile.shrink_warps,
        stages=tile.shrink_stages,
        divisible=DIVISIBLE,
    )


def compile_expand(tile: Tile, capability: int, *, embedding: bool) -> Binary:
    constants = {
        "SPLITS": 1 if embedding else tile.splits,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "RANKS": RANK_TILE,
        "EMBEDDING": embedding,
        "COMPUTE": tl.bfloat16,
    }
    return compile_kernel(
        expand,
        {**TYPES, "hidden_ptr": "*bf16"} if embedding else TYPES,
        constants,
        capability=capability,
        warps=tile.expand_warps,
        stages=tile.expand_stages,
        divisible=DIVISIBLE,
    )


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    "slices",
    [
        pytest.param(1, marks=pytest.mark.wide, id="o or down"),
        pytest.param(2, marks=pytest.mark.wide, id="gate and up"),
        pytest.param(3, id="qkv"),
    ],
)
@pytest.mark.parametrize("name", TILES)
def test_shrink_compiles_without_spills_onto_tensor_cores(name, slices, capability):
    assert compile_shrink(TILES[name], capability, slices).faults(capability) == []


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", TILES)
def test_expand_compiles_without_spills_onto_tensor_cores(name, capability):
    assert compile_expand(TILES[name], capability, embedding=False).faults(capability) == []


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("tile", [WHOLE, LONG], ids=["16 rows", "64 rows"])
def test_the_embedding_compiles_without_spills_onto_tensor_cores(tile, capability):
    assert compile_expand(tile, capability, embedding=True).faults(capability) == []


def test_hopper_multiplies_long_chunks_in_warp_groups():
    assert compile_shrink(LONG, 90).count("HGMMA") > 0


def test_adapters_are_read_in_words_of_16_bytes():
    for binary in (compile_shrink(WHOLE, 90), compile_expand(WHOLE, 90, embedding=False)):
        assert binary.wide_copies > 0
