"""Paged causal attention on CUDA: one kernel for decode and for prefill chunks, and its merge.

The queries of a key head are packed into the rows of one tile. Softmax is online, in base 2, and
its running maximum is rounded up to an integer: rescaling is then a multiplication by a power of
two, which is exact. So the merge of two splits rounds once, in the sum, wherever it happens, and
splits that are attended by one program or by many give the same bits.
"""

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Rows (queries times heads of a group) and keys of a step, with its launch options."""

    rows: int
    columns: int
    warps: int
    stages: int


SHORT = AttentionTile(16, 64, 8, 2)
"""Decodes; also the one tile of batch-invariant mode."""
LONG = AttentionTile(128, 64, 8, 2)
"""Prefill chunks."""


@triton.jit
def _step(  # type: ignore[no-untyped-def]
    q,
    position,
    key,
    low,
    end,
    keys_ptr,
    values_ptr,
    table_ptr,
    block_stride,
    scale_log2,
    window,
    largest,
    total,
    sums,
    KV_WIDTH: tl.constexpr,
    D: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOWED: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Takes the keys at positions `key` into a running softmax. q: [rows, D]."""
    d = tl.arange(0, D)
    known = (key >= low) & (key < end)
    block = tl.load(table_ptr + key // BLOCK_TOKENS, mask=known, other=0).to(tl.int64)
    offset = block * block_stride + (key % BLOCK_TOKENS) * KV_WIDTH
    k = tl.load(keys_ptr + offset[None, :] + d[:, None], mask=known[None, :], other=0.0)
    v = tl.load(values_ptr + offset[:, None] + d[None, :], mask=known[:, None], other=0.0)
    scores = tl.dot(q, k.to(COMPUTE), input_precision="ieee") * scale_log2
    seen = known[None, :] & (key[None, :] <= position[:, None])
    if WINDOWED:
        seen &= key[None, :] > position[:, None] - window
    scores = tl.where(seen, scores, float("-inf"))
    new = tl.maximum(largest, tl.ceil(tl.max(scores, 1)))
    finite = tl.where(new == float("-inf"), 0.0, new)
    kept = tl.exp2(largest - finite)
    weights = tl.exp2(scores - finite[:, None])
    total = total * kept + tl.sum(weights, 1)
    sums = sums * kept[:, None]
    sums = tl.dot(weights.to(COMPUTE), v.to(COMPUTE), sums, input_precision="ieee")
    return new, total, sums


@triton.jit
def merged(largest, total, sums, other_largest, other_total, other_sums):  # type: ignore[no-untyped-def]
    """Two softmaxes over different keys as one. Every factor is a power of two."""
    new = tl.maximum(largest, other_largest)
    finite = tl.where(new == float("-inf"), 0.0, new)
    kept = tl.exp2(largest - finite)
    other = tl.exp2(other_largest - finite)
    total = total * kept + other_total * other
    return new, total, sums * kept[:, None] + other_sums * other[:, None]


@triton.jit
def attend(  # type: ignore[no-untyped-def]
    q_ptr,  # [T, HEADS, D]
    q_stride,
    keys_ptr,  # one layer's view of the cache
    values_ptr,
    out_ptr,  # [T, HEADS, D]
    partial_ptr,  # [partials, HEADS, D] fp32
    partial_stats_ptr,  # [partials, HEADS, 2] fp32: largest score, total weight
    work_ptr,  # PagedWork.buffer
    item_start,  # where this kernel's items begin in it
    table_start,
    block_stride,  # elements from one block to the next
    scale_log2,
    window,
    COUNT: tl.constexpr,  # which of the buffer's counts bounds the items
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,  # keys of a split; 0: all keys are one
    WINDOWED: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Programs: item, key head."""
    if tl.program_id(0) >= tl.load(work_ptr + COUNT):
        return
    kv_head = tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    KV_WIDTH: tl.constexpr = KV_HEADS * D
    item = work_ptr + item_start + 8 * tl.program_id(0)
    table_ptr = work_ptr + table_start + tl.load(item)
    first_row = tl.load(item + 1)
    count = tl.load(item + 2)
    start = tl.load(item + 3)
    first_key = tl.load(item + 4)
    end = tl.load(item + 5)
    partial = tl.load(item + 6)
    partial_step = tl.load(item + 7)

    m = tl.arange(0, ROWS)
    query = m // GROUP
    head = kv_head * GROUP + m % GROUP
    inside = query < count
    position = start + query
    d = tl.arange(0, D)
    q_rows = q_ptr + (first_row + query).to(tl.int64)[:, None] * q_stride + head[:, None] * D
    q = tl.load(q_rows + d[None, :], mask=inside[:, None], other=0.0).to(COMPUTE)
    keys_ptr += kv_head * D
    values_ptr += kv_head * D
    low = 0
    if WINDOWED:
        low = tl.maximum(start + 1 - window, 0)
    n = tl.arange(0, COLUMNS)
    begin = tl.maximum(first_key, low // COLUMNS * COLUMNS)

    largest = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    sums = tl.zeros((ROWS, D), dtype=tl.float32)
    if SPLIT == 0:
        for key in range(begin, end, COLUMNS):
            largest, total, sums = _step(
                q, position, key + n, low, end, keys_ptr, values_ptr, table_ptr, block_stride,
                scale_log2, window, largest, total, sums,
                KV_WIDTH, D, BLOCK_TOKENS, WINDOWED, COMPUTE,
            )  # fmt: skip
    else:
        for split in range(first_key, end, SPLIT):
            own_largest = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
            own_total = tl.zeros((ROWS,), dtype=tl.float32)
            own_sums = tl.zeros((ROWS, D), dtype=tl.float32)
            for key in range(tl.maximum(split, begin), tl.minimum(split + SPLIT, end), COLUMNS):
                own_largest, own_total, own_sums = _step(
                    q, position, key + n, low, end, keys_ptr, values_ptr, table_ptr, block_stride,
                    scale_log2, window, own_largest, own_total, own_sums,
                    KV_WIDTH, D, BLOCK_TOKENS, WINDOWED, COMPUTE,
                )  # fmt: skip
            largest, total, sums = merged(largest, total, sums, own_largest, own_total, own_sums)

    if partial < 0:
        sums *= (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
        row = (first_row + query).to(tl.int64) * HEADS + head
        out = out_ptr + row[:, None] * D + d[None, :]
        tl.store(out, sums.to(out_ptr.dtype.element_ty), mask=inside[:, None])
    else:
        row = (partial + query * partial_step).to(tl.int64) * HEADS + head
        tl.store(partial_ptr + row[:, None] * D + d[None, :], sums, mask=inside[:, None])
        tl.store(partial_stats_ptr + 2 * row, largest, mask=inside)
        tl.store(partial_stats_ptr + 2 * row + 1, total, mask=inside)


@triton.jit
def merge(  # type: ignore[no-untyped-def]
    partial_ptr,
    partial_stats_ptr,
    out_ptr,
    work_ptr,
    merge_start,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums a row's partial results, first split first. Programs: merge, block of heads."""
    if tl.program_id(0) >= tl.load(work_ptr + 2):
        return
    entry = work_ptr + merge_start + 3 * tl.program_id(0)
    row = tl.load(entry).to(tl.int64)
    first = tl.load(entry + 1)
    count = tl.load(entry + 2)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = head < HEADS
    d = tl.arange(0, D)
    largest = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    sums = tl.zeros((BLOCK, D), dtype=tl.float32)
    for index in range(count):
        at = (first + index).to(tl.int64) * HEADS + head
        own_largest = tl.load(partial_stats_ptr + 2 * at, mask=inside, other=0.0)
        own_total = tl.load(partial_stats_ptr + 2 * at + 1, mask=inside, other=0.0)
        own_sums = tl.load(
            partial_ptr + at[:, None] * D + d[None, :], mask=inside[:, None], other=0.0
        )
        largest, total, sums = merged(largest, total, sums, own_largest, own_total, own_sums)
    sums *= (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    out = out_ptr + (row * HEADS + head)[:, None] * D + d[None, :]
    tl.store(out, sums.to(out_ptr.dtype.element_ty), mask=inside[:, None])
