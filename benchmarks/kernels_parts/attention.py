"""Paged attention: decodes, a long context, a prompt's chunk, a window, heads of 64."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from benchmarks import roofline
from benchmarks.kernels_parts.case import Case, Target, Trial, difference, largest
from benchmarks.step_roofline import Shape
from engine.kernels import reference
from engine.model.attention import AttentionBatch, QueryChunk, token_rows
from engine.model.config import ModelConfig, RopeScaling
from engine.model.kv_cache import KvCache, block_bytes
from engine.types import BLOCK_TOKENS

Step = list[tuple[int, int]]
"""(position of the first query, queries) of each sequence."""


def cases(target: Target) -> Iterator[Case]:
    sizes, shape = target.sizes, target.shape
    for rows in sizes.decodes:
        name = f"attention, decode of {rows} at {sizes.context}"
        yield _case(target, shape, name, [(sizes.context - 1, 1)] * rows)
    long = 8 * sizes.context
    yield _case(target, shape, f"attention, decode of 1 at {long}", [(long - 1, 1)])
    chunk: Step = [(sizes.context, sizes.prompt)]
    yield _case(target, shape, f"attention, prompt of {sizes.prompt} after {sizes.context}", chunk)
    most: Step = [(sizes.context - 1, 1)] * sizes.decodes[-1]
    window = sizes.context // 4
    for name, step in (("decode", most), ("prompt", chunk)):
        yield _case(target, shape, f"attention, {name}, window of {window}", step, window)
        small = replace(shape, head_dim=64)
        if small != shape:
            yield _case(target, small, f"attention, {name}, heads of 64", step)


def _case(target: Target, shape: Shape, name: str, step: Step, window: int | None = None) -> Case:
    work = roofline.attention(step, shape.heads, shape.kv_heads, shape.head_dim, window)
    return Case(name, work, lambda: _open(target, shape, step, window))


def _open(target: Target, shape: Shape, step: Step, window: int | None) -> Trial:
    cache, chunks, blocks = _filled(target, shape, step, window)
    rows = sum(count for _, count in step)
    q = target.randn(rows, shape.heads, shape.head_dim)
    attend = _attend(target, cache, chunks, blocks, q)

    def error() -> float:
        # the reference takes queries one at a time: the first and the last of the step
        actual, found = attend(), []
        for row, chunk, index in ((0, chunks[0], 0), (rows - 1, chunks[-1], chunks[-1].count - 1)):
            one = QueryChunk(row, 1, chunk.start + index, chunk.table)
            expected = reference.paged_attention(cache, 0, [one], q)[row]
            found.append(difference(actual[row], expected.flatten()))
        return largest(*found)

    return Trial(attend, error)


def _filled(
    target: Target, shape: Shape, step: Step, window: int | None
) -> tuple[KvCache, list[QueryChunk], int]:
    """A cache of one layer with random keys and values, and each sequence's own blocks in it."""
    config = ModelConfig(
        "llama", shape.vocabulary, shape.hidden, shape.inner, 1, shape.heads, shape.kv_heads,
        shape.head_dim, 1e-5, 5e5, RopeScaling(), 1 << 17, False, (0,), sliding_window=window,
    )  # fmt: skip
    chunks, first, used = [], 0, 0
    for start, count in step:
        size = -(-(start + count) // BLOCK_TOKENS)
        chunks.append(QueryChunk(first, count, start, np.arange(used, used + size)))
        first, used = first + count, used + size
    arena = torch.empty(used * block_bytes(config, "bf16"), dtype=torch.uint8, device=target.device)
    arena.view(torch.bfloat16).normal_()
    return KvCache(arena, config, "bf16"), chunks, used


def _attend(
    target: Target, cache: KvCache, chunks: list[QueryChunk], blocks: int, q: Tensor
) -> Callable[[], Tensor]:
    if target.triton:
        from engine.kernels.attention_cuda import TritonAttention

        attention = TritonAttention(cache, max_rows=q.shape[0], max_blocks=blocks)
        attention.build(chunks)
        return lambda: attention.attend(0, q, q, q)
    batch = AttentionBatch(cache, chunks, batch_invariant=False)
    own, config = token_rows(cache, chunks), cache.config
    k, v = (
        part[own].float().view(-1, config.kv_heads, config.head_dim)
        for part in (cache.keys(0), cache.values(0))
    )
    return lambda: batch.attend(0, q, k, v)
