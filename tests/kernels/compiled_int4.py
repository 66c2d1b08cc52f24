"""The 4-bit linear compiled for GPUs that are not here."""

import itertools

import pytest
import triton.language as tl

from engine.kernels import lora_triton
from engine.kernels.compile import Binary, compile_kernel
from engine.kernels.int4_triton import TILES, choose_tile, int4_linear

SIZES = frozenset({"x_stride", "y_stride", "out_features", "out_padded", "in_features"})
STEPS = ("capacity", "hidden_stride", "plane_stride", "batch_capacity")
ELEMENTS = ("x_ptr", "scale_ptr", "zero_ptr", "y_ptr")
TYPES = {
    **dict.fromkeys((*SIZES, *STEPS, "rows", "modules"), "i32"),
    **dict.fromkeys(("arrived_ptr", "rows_ptr", "rank_ptr", "group_ptr", "tiles_ptr"), "*i32"),
    **dict.fromkeys(("parts_ptr", "hidden_ptr", "adapter_scale_ptr"), "*fp32"),
    "words_ptr": "*i16",
    "weights_ptr": "*bf16",
    "b_ptr": "*i64",
}
wide = pytest.mark.wide
HALVES = {"bf16": tl.bfloat16, "fp16": tl.float16}
CASES = [
    *itertools.product(["16", "32", "64", "128"], [128], [False], ["bf16"]),
    *itertools.product(["16 small groups", "32", "64"], [32], [True], ["bf16"]),
    ("16", 128, True, "fp16"),
    ("64", 128, False, "fp16"),
    ("128", 32, True, "fp16"),
    ("16 small groups", 64, False, "bf16"),
]


def on_cards(cases: list[tuple]) -> list[tuple]:
    """Each case for each card; the tile of 128 rows is Hopper's."""
    return [
        (*case, capability) for case in cases for capability in (80, 90)
        if case[0] != "128" or capability >= 90
    ]  # fmt: skip


def with_adapters() -> list[tuple[str, int, int]]:
    """(tile, planes, capability) of every product with adapters that a batch can ask for."""
    counts, names = (1, 16, 17, 32, 33, 127, 128, 512, 513, 4096), {t: n for n, t in TILES.items()}
    asked = {
        (names[choose_tile(rows, group, capability, lora.splits)], lora.splits, capability)
        for rows, adapter_rows, adapters in itertools.product(counts, repeat=3)
        if rows >= adapter_rows >= adapters
        for lora in [lora_triton.choose_tile(adapter_rows, adapters)]
        for group, capability in itertools.product((32, 64, 128), (80, 90))
    }
    return sorted(asked)


def compile_int4(
    name: str,
    group: int,
    zero: bool,
    dtype: str,
    capability: int,
    planes: int = 0,
    *,
    even: bool = True,
) -> Binary:
    tile = TILES[name]
    constants = {
        "PLANES": planes,
        "GROUP": group,
        "ZERO": zero,
        "EVEN": even,
        "SCALE_SUMS": tile.scale_sums and not zero,
        "SPLITS": tile.splits,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "BITS": True,
        "COMPUTE": HALVES[dtype],
    }
    return compile_kernel(
        int4_linear,
        {**TYPES, **dict.fromkeys(ELEMENTS, f"*{dtype}")},
        constants,
        capability=capability,
        warps=tile.warps,
        stages=tile.stages,
        divisible=SIZES | set(STEPS),
    )


@pytest.mark.parametrize(("name", "group", "zero", "dtype", "capability"), on_cards(CASES))
def test_it_compiles_without_spills_onto_tensor_cores(name, group, zero, dtype, capability):
    binary = compile_int4(name, group, zero, dtype, capability)
    assert binary.faults(capability) == []
    assert binary.wide_copies > 0
    if capability == 90:
        assert binary.count("HGMMA") > 0


@pytest.mark.parametrize(("name", "planes", "capability"), with_adapters())
def test_with_adapters_it_compiles_without_spills_onto_tensor_cores(name, planes, capability):
    group = 32 if name == "16 small groups" else 128
    binary = compile_int4(name, group, True, "bf16", capability, planes)
    assert binary.faults(capability) == []
    if capability == 90:
        assert binary.count("HGMMA") > 0


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        pytest.param(*case, marks=() if case in (("16 small groups", 90), ("64", 80)) else wide)
        for case in on_cards([("16 small groups",), ("32",), ("64",), ("128",)])
    ],
)
def test_an_input_that_ends_within_a_block_compiles_too(name, capability):
    binary = compile_int4(name, 32, False, "bf16", capability, even=False)
    assert binary.faults(capability) == []
    if capability == 90:
        assert binary.count("HGMMA") > 0
