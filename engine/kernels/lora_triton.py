"""Multi-LoRA on CUDA: a shrink and an expand kernel over chunks of one adapter.

Punica (https://arxiv.org/abs/2310.18547) and S-LoRA (https://arxiv.org/abs/2311.03285) name the two
halves. Here the programs are chunks x output tiles: there is no axis over the loaded adapters, and
a rank is padded to one tile of 16 columns at most. Shrink splits the input into planes that expand
adds in a fixed order, so results do not depend on timing.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

RANK_TILE = 16
SPLIT_ROWS = 512
"""Most adapter rows of a batch whose input is split: more rows fill a GPU without it."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A way to cut the work, with the launch options that compile without spills for it."""

    rows: int  # of a chunk
    splits: int  # planes of the shrink's input
    depth: int  # of the input, a step of the shrink
    columns: int  # of the output, a program of the expand
    shrink_warps: int
    shrink_stages: int
    expand_warps: int
    expand_stages: int


SPLIT = Tile(16, 8, 256, 128, 4, 3, 4, 2)
"""Few rows: a decode step's chunks alone do not fill a GPU."""
WHOLE = Tile(16, 1, 256, 128, 4, 3, 4, 2)
"""Many adapters of few rows each; also the one tile of batch-invariant mode."""
LONG = Tile(64, 1, 128, 128, 4, 3, 8, 2)
"""Prefill: many rows an adapter."""
TILES = {"split": SPLIT, "whole": WHOLE, "long": LONG}


def choose_tile(adapter_rows: int, adapters: int) -> Tile:
    """The tile for a batch of so many rows over so many adapters (from counts, not yet timed)."""
    if adapter_rows > 32 * adapters:
        return LONG
    return SPLIT if adapter_rows <= SPLIT_ROWS else WHOLE


@triton.jit
def shrink(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, in]
    x_stride,
    weights_ptr,  # the arena, in elements of the adapter dtype
    hidden_ptr,  # [SPLITS, SLICES, capacity, hidden_stride] fp32, by position among sorted rows
    hidden_stride,
    batch_ptr,  # LoraBatch.buffer
    capacity,
    a_ptr,  # [slots, modules] int64
    rank_ptr,  # [slots, modules] int32
    modules,
    group_ptr,  # [SLICES, 2] int32: module, columns
    in_features,
    SLICES: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    DEPTH: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """hidden = x A^T. Programs: chunk, rank tile of a slice, part of the input."""
    chunk = tl.program_id(0)
    if chunk >= tl.load(batch_ptr):
        return
    tile = tl.program_id(1)
    split = tl.program_id(2)
    part = tile % SLICES
    first_rank = tile // SLICES * RANKS
    start = tl.load(batch_ptr + 1 + capacity + chunk)
    length = tl.load(batch_ptr + 1 + 2 * capacity + chunk)
    slot = tl.load(batch_ptr + 1 + 3 * capacity + chunk)
    entry = slot * modules + tl.load(group_ptr + 2 * part)
    rank = tl.load(rank_ptr + entry)
    if first_rank >= rank:
        return

    offset = tl.multiple_of(tl.load(a_ptr + entry), 16)
    m = tl.arange(0, ROWS)
    r = first_rank + tl.arange(0, RANKS)
    k = tl.arange(0, DEPTH)
    in_chunk = m < length
    rows = tl.load(batch_ptr + 1 + start + m, mask=in_chunk, other=0).to(tl.int64)
    x_rows = x_ptr + rows[:, None] * x_stride
    a_columns = weights_ptr + offset + r[None, :].to(tl.int64) * in_features

    steps = tl.cdiv(tl.cdiv(in_features, DEPTH), SPLITS)
    begin = split * steps * DEPTH
    end = tl.minimum(begin + steps * DEPTH, in_features)
    sums = tl.zeros((ROWS, RANKS), dtype=tl.float32)
    for position in range(begin, end, DEPTH):
        columns = position + k
        inside = columns < end
        x = tl.load(x_rows + columns[None, :], mask=in_chunk[:, None] & inside[None, :], other=0.0)
        a = tl.load(
            a_columns + columns[:, None], mask=(r < rank)[None, :] & inside[:, None], other=0.0
        )
        sums = tl.dot(x.to(COMPUTE), a.to(COMPUTE), sums, input_precision="ieee")
    position = (split * SLICES + part) * capacity + start + m
    hidden = hidden_ptr + position.to(tl.int64)[:, None] * hidden_stride + r[None, :]
    tl.store(hidden, sums, mask=in_chunk[:, None] & (r < rank)[None, :])


@triton.jit
def _expand_tile(  # type: ignore[no-untyped-def]
    hidden_rows,
    plane_stride,
    weights_ptr,
    b_offset,
    b_rows,
    b_inside,
    in_chunk,
    rank,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """sum over planes of hidden [ROWS, rank] @ B[b_rows, rank]^T, in fp32."""
    r0 = tl.arange(0, RANKS)
    b_columns = weights_ptr + b_offset + b_rows[None, :].to(tl.int64) * rank
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, rank, RANKS):
        r = first + r0
        inside = r < rank
        hidden = tl.zeros((ROWS, RANKS), dtype=tl.float32)
        for plane in tl.static_range(SPLITS):
            hidden += tl.load(
                hidden_rows + plane * plane_stride + r[None, :],
                mask=in_chunk[:, None] & inside[None, :],
                other=0.0,
            ).to(tl.float32)
        b = tl.load(b_columns + r[:, None], mask=b_inside[None, :] & inside[:, None], other=0.0)
        sums = tl.dot(hidden.to(COMPUTE), b.to(COMPUTE), sums, input_precision="ieee")
    return sums


@triton.jit
def expand(  # type: ignore[no-untyped-def]
    hidden_ptr,  # as in shrink; for an embedding the arena itself
    hidden_stride,
    plane_stride,
    weights_ptr,
    y_ptr,  # [T, columns of all slices], added to in place
    y_stride,
    tokens_ptr,  # [T] int64, for an embedding
    batch_ptr,
    capacity,
    a_ptr,
    b_ptr,
    rank_ptr,
    scale_ptr,  # [slots, modules] fp32
    modules,
    group_ptr,
    tiles_ptr,  # [tiles, 3] int32: slice, first column of the slice's, first column of y
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
    EMBEDDING: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """y += scale * hidden B^T. Programs: chunk, tile of output columns."""
    chunk = tl.program_id(0)
    if chunk >= tl.load(batch_ptr):
        return
    tile = tiles_ptr + 3 * tl.program_id(1)
    part = tl.load(tile)
    first_column = tl.load(tile + 1)
    y_column = tl.load(tile + 2)
    start = tl.load(batch_ptr + 1 + capacity + chunk)
    length = tl.load(batch_ptr + 1 + 2 * capacity + chunk)
    slot = tl.load(batch_ptr + 1 + 3 * capacity + chunk)
    entry = slot * modules + tl.load(group_ptr + 2 * part)
    rank = tl.load(rank_ptr + entry)
    if rank == 0:
        return

    m = tl.arange(0, ROWS)
    n = tl.arange(0, COLUMNS)
    in_chunk = m < length
    rows = tl.load(batch_ptr + 1 + start + m, mask=in_chunk, other=0).to(tl.int64)
    inside = first_column + n < tl.load(group_ptr + 2 * part + 1)
    b_offset = tl.multiple_of(tl.load(b_ptr + entry), 16)
    if EMBEDDING:
        token = tl.load(tokens_ptr + rows, mask=in_chunk, other=0)
        hidden_rows = hidden_ptr + tl.load(a_ptr + entry) + token[:, None] * rank
    else:
        position = part * capacity + start + m
        hidden_rows = hidden_ptr + position.to(tl.int64)[:, None] * hidden_stride
    if rank % 8 == 0:  # tells the compiler that rows of B begin on 16 bytes
        sums = _expand_tile(
            hidden_rows, plane_stride, weights_ptr, b_offset, first_column + n, inside, in_chunk,
            tl.multiple_of(rank, 8), ROWS, COLUMNS, RANKS, SPLITS, COMPUTE,
        )  # fmt: skip
    else:
        sums = _expand_tile(
            hidden_rows, plane_stride, weights_ptr, b_offset, first_column + n, inside, in_chunk,
            rank, ROWS, COLUMNS, RANKS, SPLITS, COMPUTE,
        )  # fmt: skip
    sums *= tl.load(scale_ptr + entry)
    y = y_ptr + rows[:, None] * y_stride + (y_column + n)[None, :]
    mask = in_chunk[:, None] & inside[None, :]
    old = tl.load(y, mask=mask, other=0.0)
    tl.store(y, (old.to(tl.float32) + sums).to(old.dtype), mask=mask)
