"""The 4-bit linear on CUDA: y^T = W x^T, so that tensor cores take the weights from registers.

A nibble becomes a number by its bits: or'ed into the mantissa of 128 (bf16) or 1024 (fp16) it is
that plus q, from which a subtraction leaves q - 8 exactly. For few rows the scale is applied to the
sums, for many to the weights. Where the columns of W alone do not fill a GPU, the input is split:
the last program to arrive adds the parts, always in the same order. The rows' adapters may be added
before y is written: see `fused_rows` and `fuse`.
"""

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class Int4Tile:
    """A way to cut the work, with the launch options that compile without spills for it."""

    rows: int  # of x
    columns: int  # of y
    splits: int  # of the input
    warps: int
    stages: int
    scale_sums: bool  # scales are applied to the sums (where the weights have no zeros)


ROWS_16 = Int4Tile(16, 128, 4, 4, 5, scale_sums=True)
ROWS_16_SMALL_GROUPS = Int4Tile(16, 64, 4, 4, 4, scale_sums=False)
ROWS_32 = Int4Tile(32, 64, 2, 4, 4, scale_sums=True)
ROWS_64 = Int4Tile(64, 128, 1, 8, 3, scale_sums=False)
"""Also the one tile of batch-invariant mode."""
ROWS_128 = Int4Tile(128, 128, 1, 8, 3, scale_sums=False)
"""Prefill on Hopper; before it the weights would spill, and so would adapters of several planes."""
TILES = {
    "16": ROWS_16,
    "16 small groups": ROWS_16_SMALL_GROUPS,
    "32": ROWS_32,
    "64": ROWS_64,
    "128": ROWS_128,
}
MAX_SPLIT_ROWS = 32


def choose_tile(rows: int, group: int, capability: int, planes: int = 0) -> Int4Tile:
    """The tile for so many rows of x (from counts, not yet timed).

    `planes`: of the adapters' shrink where the product adds them; 0: it adds none.
    """
    if rows <= ROWS_16.rows:
        return ROWS_16 if group == 128 else ROWS_16_SMALL_GROUPS
    if rows <= ROWS_32.rows:
        return ROWS_32
    return ROWS_128 if rows >= 128 and capability >= 90 and planes <= 1 else ROWS_64


@triton.jit
def _four_codes(words, BITS: tl.constexpr, COMPUTE: tl.constexpr):  # type: ignore[no-untyped-def]
    """q - 8 of the four nibbles of each word. `BITS`: by their bits, which only a GPU can."""
    if BITS and tl.bfloat16 == COMPUTE:
        a, b, c, d = tl.inline_asm_elementwise(
            """{ .reg .b32 t;
            lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
            shr.b32 t, $4, 4;  lop3.b32 $1, t, 0x000f000f, 0x43004300, 0xea;
            shr.b32 t, $4, 8;  lop3.b32 $2, t, 0x000f000f, 0x43004300, 0xea;
            shr.b32 t, $4, 12; lop3.b32 $3, t, 0x000f000f, 0x43004300, 0xea; }""",
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
        eight: tl.constexpr = 136.0
    elif BITS and tl.float16 == COMPUTE:
        a, b, c, d = tl.inline_asm_elementwise(
            """{ .reg .b32 t;
            lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;
            shr.b32 t, $4, 4;  lop3.b32 $1, t, 0x000f000f, 0x64006400, 0xea;
            shr.b32 t, $4, 8;  lop3.b32 $2, t, 0x000f000f, 0x64006400, 0xea;
            shr.b32 t, $4, 12; lop3.b32 $3, t, 0x000f000f, 0x64006400, 0xea; }""",
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
        eight: tl.constexpr = 1032.0  # type: ignore[no-redef]
    else:
        a = (words & 15).to(COMPUTE)
        b = ((words >> 4) & 15).to(COMPUTE)
        c = ((words >> 8) & 15).to(COMPUTE)
        d = ((words >> 12) & 15).to(COMPUTE)
        eight: tl.constexpr = 8.0  # type: ignore[no-redef]
    less = tl.full((1, 1), eight, COMPUTE)
    return a - less, b - less, c - less, d - less


@triton.jit
def _base_sums(  # type: ignore[no-untyped-def]
    x_ptr,
    x_stride,
    words_ptr,
    scale_ptr,
    zero_ptr,
    out_padded,
    in_features,
    row,
    row_inside,
    column,
    first_block,
    end_block,
    blocks,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    EVEN: tl.constexpr,
    SCALE_SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BITS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """W [COLUMNS, blocks of 128] @ x^T: [COLUMNS, ROWS] fp32."""
    PLANES: tl.constexpr = GROUP // 32  # planes that share a scale
    j = tl.arange(0, 32)
    tile = (column // 64).to(tl.int64) * blocks * (64 * 32) + (column % 64) * 32
    word = words_ptr + tile[:, None] + j[None, :]
    x_rows = x_ptr + row[None, :].to(tl.int64) * x_stride + j[:, None]
    sums = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    for block in range(first_block, end_block):
        codes = _four_codes(tl.load(word + block * (64 * 32)), BITS, COMPUTE)
        of_group = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
        for plane in tl.static_range(4):
            k = block * 128 + plane * 32
            mask = row_inside[None, :]
            if not EVEN:
                mask = mask & ((k + j) < in_features)[:, None]
            x = tl.load(x_rows + k, mask=mask, other=0.0).to(COMPUTE)
            at = (block * (4 // PLANES) + plane // PLANES) * out_padded + column
            if SCALE_SUMS:
                of_group = tl.dot(codes[plane], x, of_group, input_precision="ieee")
                if plane % PLANES == PLANES - 1:
                    sums += of_group * tl.load(scale_ptr + at).to(tl.float32)[:, None]
                    of_group = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
            else:
                weights = codes[plane] * tl.load(scale_ptr + at).to(COMPUTE)[:, None]
                if ZERO:
                    weights += tl.load(zero_ptr + at).to(COMPUTE)[:, None]
                sums = tl.dot(weights, x, sums, input_precision="ieee")
    return sums


@triton.jit
def _b_block(  # type: ignore[no-untyped-def]
    weights_ptr, offset, column, column_inside, r, rank
):
    """B [columns, 16 of its ranks], 0 outside of either."""
    return tl.load(
        weights_ptr + offset + column[:, None].to(tl.int64) * rank + r[None, :],
        mask=column_inside[:, None] & (r < rank)[None, :],
        other=0.0,
    )


@triton.jit
def _adapter_sums(  # type: ignore[no-untyped-def]
    sums,  # [COLUMNS, ROWS] fp32
    row,
    row_inside,
    column,
    split,
    rows_ptr,  # FusedRows.buffer
    capacity,
    hidden_ptr,  # of the shrink: [PLANES, slices, batch capacity, hidden_stride] fp32
    hidden_stride,
    plane_stride,
    batch_capacity,
    weights_ptr,  # the arena
    b_ptr,
    rank_ptr,
    scale_ptr,
    modules,
    group_ptr,  # [slices, 2] int32: module, columns
    tiles_ptr,  # [tiles, 3] int32: slice, first column of the slice's, first column of y
    PLANES: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """sums + scale * B hidden^T of every row's own adapter, 16 ranks of one adapter at a time."""
    part = tl.load(tiles_ptr + 3 * tl.program_id(0))
    first_column = tl.load(tiles_ptr + 3 * tl.program_id(0) + 1)
    module = tl.load(group_ptr + 2 * part)
    width = tl.load(group_ptr + 2 * part + 1)
    own = column - tl.program_id(0) * COLUMNS + first_column
    row_slot = tl.load(rows_ptr + row, mask=row_inside, other=-1)
    position = tl.load(rows_ptr + capacity + row, mask=row_inside, other=0)
    hidden_rows = (part * batch_capacity + position).to(tl.int64) * hidden_stride
    starts = rows_ptr + 2 * capacity + tl.program_id(1)
    blocks = rows_ptr + 3 * capacity + 1
    for block in range(tl.load(starts) + split, tl.load(starts + 1), SPLITS):
        slot = tl.load(blocks + 2 * block)
        r = tl.load(blocks + 2 * block + 1) + tl.arange(0, 16)
        entry = slot * modules + module
        rank = tl.load(rank_ptr + entry)
        mask = (r < rank)[:, None] & (row_slot == slot)[None, :]
        hidden = tl.zeros((16, ROWS), dtype=tl.float32)
        for plane in tl.static_range(PLANES):
            at = hidden_ptr + plane * plane_stride + hidden_rows[None, :] + r[:, None]
            hidden += tl.load(at, mask=mask, other=0.0)
        hidden *= tl.load(scale_ptr + entry)
        offset = tl.multiple_of(tl.load(b_ptr + entry), 16)
        if rank % 8 == 0:  # tells the compiler that rows of B begin on 16 bytes
            b = _b_block(weights_ptr, offset, own, own < width, r, tl.multiple_of(rank, 8))
        else:
            b = _b_block(weights_ptr, offset, own, own < width, r, rank)
        sums = tl.dot(b.to(COMPUTE), hidden.to(COMPUTE), sums, input_precision="ieee")
    return sums


@triton.jit
def int4_linear(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, in]
    x_stride,
    words_ptr,  # PackedInt4
    scale_ptr,
    zero_ptr,
    y_ptr,  # [T, out]
    y_stride,
    parts_ptr,  # [tiles, SPLITS, COLUMNS, ROWS] fp32
    arrived_ptr,  # [tiles] int32, 0 between launches
    rows,
    out_features,
    out_padded,
    in_features,
    rows_ptr,  # this and what follows: see _adapter_sums
    capacity,
    hidden_ptr,
    hidden_stride,
    plane_stride,
    batch_capacity,
    weights_ptr,
    b_ptr,
    rank_ptr,
    adapter_scale_ptr,
    modules,
    group_ptr,
    tiles_ptr,
    PLANES: tl.constexpr,  # of hidden; 0: no adapters
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    EVEN: tl.constexpr,  # in_features is a multiple of 128
    SCALE_SUMS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BITS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Programs: tile of y's columns, tile of rows, part of the input."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(2)
    row_inside = row < rows
    blocks = tl.cdiv(in_features, 128)
    share = tl.cdiv(blocks, SPLITS)
    first_block = split * share
    sums = _base_sums(
        x_ptr, x_stride, words_ptr, scale_ptr, zero_ptr, out_padded, in_features, row, row_inside,
        column, first_block, tl.minimum(first_block + share, blocks), blocks,
        GROUP, ZERO, EVEN, SCALE_SUMS, ROWS, COLUMNS, BITS, COMPUTE,
    )  # fmt: skip
    if PLANES > 0:
        sums = _adapter_sums(
            sums, row, row_inside, column, split, rows_ptr, capacity, hidden_ptr, hidden_stride,
            plane_stride, batch_capacity, weights_ptr, b_ptr, rank_ptr, adapter_scale_ptr, modules,
            group_ptr, tiles_ptr, PLANES, SPLITS, ROWS, COLUMNS, COMPUTE,
        )  # fmt: skip
    y = y_ptr + row[None, :].to(tl.int64) * y_stride + column[:, None]
    mask = row_inside[None, :] & (column < out_features)[:, None]
    if SPLITS == 1:
        tl.store(y, sums.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        within = tl.arange(0, COLUMNS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        parts = parts_ptr + tile.to(tl.int64) * (SPLITS * COLUMNS * ROWS) + within
        tl.store(parts + split * (COLUMNS * ROWS), sums)
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
            for part in range(SPLITS):
                total += tl.load(parts + part * (COLUMNS * ROWS), cache_modifier=".cg")
            tl.store(y, total.to(y_ptr.dtype.element_ty), mask=mask)
            tl.store(arrived_ptr + tile, 0)  # ready for the next launch, also of a replayed graph
