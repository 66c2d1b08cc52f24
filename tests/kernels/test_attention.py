"""The torch face of paged attention against the plain reference, and how its work is cut."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.paged_work import SPLIT_TOKENS, PagedWork
from engine.model.attention import AttentionBatch, QueryChunk
from tests.kernels.attention_cases import CASES, LAYER


@pytest.mark.parametrize("name", sorted(set(CASES) - {"no rows"}))
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_torch_face_equals_the_reference(name, batch_invariant):
    case = CASES[name]
    cache, chunks = case.cache()
    q = case.queries()
    keys, values = (torch.zeros(case.rows, case.kv_heads, case.head_dim) for _ in range(2))
    for chunk in chunks:  # of the step's own tokens, as they lie in the cache
        for index in range(chunk.count):
            block, offset = divmod(chunk.start + index, 16)
            row = int(chunk.table[block]) * cache.rows_per_block + offset
            keys[chunk.first + index] = cache.keys(LAYER)[row].view(keys.shape[1:])
            values[chunk.first + index] = cache.values(LAYER)[row].view(keys.shape[1:])
    batch = AttentionBatch(cache, chunks, batch_invariant=batch_invariant)
    actual = batch.attend(LAYER, q, keys, values)
    torch.testing.assert_close(actual, case.expected(), rtol=0, atol=2e-5)


def chunk(first: int, count: int, start: int) -> QueryChunk:
    return QueryChunk(first, count, start, np.arange(-(-(start + count) // 16)))


@given(
    sequences=st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 40)), max_size=8),
    window=st.sampled_from([None, 1, 100, 1000]),
    long_queries=st.sampled_from([None, 32]),
    partials=st.integers(0, 40),
)
@settings(deadline=None, max_examples=40)
def test_every_row_sees_all_its_keys_once(sequences, window, long_queries, partials):
    work = PagedWork(
        max_rows=320, max_blocks=1100, max_partials=partials, short_queries=4,
        long_queries=long_queries, window=window,
    )  # fmt: skip
    chunks, first = [], 0
    for start, count in sequences:
        chunks.append(chunk(first, count, start))
        first += count
    work.build(chunks)
    position = {c.first + i: c.start + i for c in chunks for i in range(c.count)}
    seen: dict[int, list[tuple[int, int]]] = {row: [] for row in position}
    merged = {row: (at, count) for row, at, count in work.merges[: work.merge_count].tolist()}
    left: dict[int, list[int]] = {row: [] for row in merged}
    items = [*work.short[: work.short_count], *work.long[: work.long_count]]
    for table, row, count, start, key, end, partial, step in np.array(items).reshape(-1, 8):
        assert key % SPLIT_TOKENS == 0
        blocks = -(-end // 16)
        assert work.tables[table : table + blocks].tolist() == list(range(blocks))
        for query in range(count):
            assert start + query == position[row + query]
            seen[row + query].append((key, end))
            if partial >= 0:
                left[row + query].append(partial + query * step)
    for row, at in position.items():
        spans = sorted(seen[row])
        lowest = 0 if window is None else max(0, at + 1 - window)
        assert spans[0][0] <= lowest
        assert spans[-1][1] > at
        assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
        if row in merged:
            assert sorted(left[row]) == list(range(merged[row][0], sum(merged[row])))
    used = [index for each in left.values() for index in each]
    assert len(set(used)) == len(used)
    assert max(used, default=-1) < partials


@pytest.mark.parametrize(
    ("chunks", "remedy"),
    [([chunk(0, 9, 0)], "9 rows exceed"), ([chunk(0, 1, 100)], "7 blocks exceed")],
)
def test_a_step_beyond_its_bounds_is_refused(chunks, remedy):
    work = PagedWork(
        max_rows=8, max_blocks=6, max_partials=0, short_queries=4, long_queries=None, window=None
    )
    with pytest.raises(ValueError, match=remedy):
        work.build(chunks)
