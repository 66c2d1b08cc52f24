"""What the paged attention kernels are told: which queries read which keys, cut into items.

Plain numpy, rebuilt once a step and shared by the layers; the buffer keeps its address, so that a
captured CUDA graph goes on reading it.

Keys are cut at absolute positions, every SPLIT_TOKENS. A short item attends split after split and
merges them; where its splits are given to programs of their own, a second kernel merges what they
left, in the same order and to the same bits (see `attention_triton`). So how the work is shared out
is a matter of speed alone, and the sum of a row depends on its own context and nothing else.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.types import BLOCK_TOKENS

if TYPE_CHECKING:
    from engine.model.attention import QueryChunk

SPLIT_TOKENS = 16 * BLOCK_TOKENS
"""Keys of one split. What a program leaves to be merged is then 3 % of the bytes that it read."""
HEADER = 3
ITEM = 8
MERGE = 3

Integers = npt.NDArray[np.int32]
Positions = npt.NDArray[np.int64]


class PagedWork:
    """Items of two kinds, the merges, and every chunk's block table.

    `buffer` is int32 [HEADER + ITEM * short capacity + ITEM * max_rows + MERGE * max_rows +
    max_blocks]: the three counts | short items | long items | merges | block tables.

    An item is: where its block table begins, its first row, rows, the first row's position, first
    and end key, then (when its result is merged later, else -1) the partial result of its first row
    and the step to that of the next row. A merge is: row, first partial result, how many.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_blocks: int,
        max_partials: int,
        short_queries: int,
        long_queries: int | None,
        window: int | None,
    ) -> None:
        """`max_blocks`: most entries of all block tables of a step. `short_queries` and
        `long_queries`: most rows of an item; without the latter every item is short."""
        self.max_rows = max_rows
        self.max_partials = max_partials
        self.short_capacity = max_rows + max_partials
        self._short_queries = short_queries
        self._long_queries = long_queries
        self._window = window
        sizes = (HEADER, ITEM * self.short_capacity, ITEM * max_rows, MERGE * max_rows, max_blocks)
        ends = np.cumsum(sizes)
        self.buffer: Integers = np.zeros(ends[-1], np.int32)
        parts = np.split(self.buffer, ends[:-1])
        self._counts = parts[0]
        self._used_tables = 0
        self.short = parts[1].reshape(-1, ITEM)
        self.long = parts[2].reshape(-1, ITEM)
        self.merges = parts[3].reshape(-1, MERGE)
        self.tables = parts[4]
        self.short_start, self.long_start, self.merge_start, self.table_start = ends[:-1].tolist()

    @property
    def used(self) -> int:
        """Numbers of `buffer` that the step needs, from its beginning."""
        return self.table_start + self._used_tables

    @property
    def short_count(self) -> int:
        return int(self._counts[0])

    @property
    def long_count(self) -> int:
        return int(self._counts[1])

    @property
    def merge_count(self) -> int:
        return int(self._counts[2])

    def build(self, chunks: "Sequence[QueryChunk]") -> None:
        """Describes a new step.

        Raises ValueError when the rows or the block tables exceed their bounds.
        """
        first, count, start = (
            np.array([getattr(chunk, name) for chunk in chunks], np.int64)
            for name in ("first", "count", "start")
        )
        if count.sum() > self.max_rows:
            raise ValueError(f"{count.sum()} rows exceed the bound of {self.max_rows}")
        table = self._copy_tables(chunks, start + count)
        described = np.stack((table, first, count, start), axis=1)
        is_long = np.zeros(len(chunks), bool)
        if self._long_queries is not None:
            is_long = count > self._short_queries
            self._counts[1] = self._place(described[is_long], self._long_queries, self.long)
        self._counts[2] = self._build_short(described[~is_long])

    def _copy_tables(self, chunks: "Sequence[QueryChunk]", ends: Positions) -> Positions:
        """Where each chunk's table begins among all."""
        blocks = -(-ends // BLOCK_TOKENS)
        begin = np.cumsum(blocks) - blocks
        if blocks.sum() > self.tables.size:
            raise ValueError(f"{blocks.sum()} blocks exceed the bound of {self.tables.size}")
        self._used_tables = int(blocks.sum())
        for chunk, at, size in zip(chunks, begin.tolist(), blocks.tolist(), strict=True):
            self.tables[at : at + size] = chunk.table[:size]
        return begin

    def _build_short(self, chunks: Positions) -> int:
        """Writes the short items and the merges; how many merges there are."""
        lone = chunks[:, 2] <= self._short_queries  # one item in all: its splits may run apart
        _, splits = self._splits(chunks)
        partials = np.where(lone & (splits > 1), splits * chunks[:, 2], 0)
        partials[np.cumsum(partials) > self.max_partials] = 0  # those run split after split
        apart = partials > 0
        whole = self._place(chunks[~apart], self._short_queries, self.short)
        pieces, merges = self._cut(chunks[apart], partials[apart])
        self.short[whole : whole + len(pieces)] = pieces
        self.merges[: len(merges)] = merges
        self._counts[0] = whole + len(pieces)
        return len(merges)

    def _place(self, chunks: Positions, queries: int, items: Integers) -> int:
        """Cuts chunks into items of at most `queries` rows and writes them; how many."""
        tiles = -(-chunks[:, 2] // queries)
        within = (np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * queries
        tiled = np.repeat(chunks, tiles, axis=0)
        tiled[:, 1] += within
        tiled[:, 2] = np.minimum(tiled[:, 2] - within, queries)
        tiled[:, 3] += within
        placed = items[: len(tiled)]
        placed[:, :4] = tiled
        placed[:, 4] = self._splits(tiled)[0] * SPLIT_TOKENS
        placed[:, 5] = tiled[:, 2] + tiled[:, 3]
        placed[:, 6:] = -1
        return len(tiled)

    def _cut(self, chunks: Positions, partials: Positions) -> tuple[Positions, Positions]:
        """An item for each split of these chunks, and a merge for each of their rows."""
        first_split, splits = self._splits(chunks)
        base = np.cumsum(partials) - partials
        split = np.arange(splits.sum()) - np.repeat(np.cumsum(splits) - splits, splits)
        key = (np.repeat(first_split, splits) + split) * SPLIT_TOKENS
        owner = np.repeat(chunks, splits, axis=0)
        end = np.minimum(key + SPLIT_TOKENS, owner[:, 2] + owner[:, 3])
        step = np.repeat(splits, splits)
        items = np.column_stack((owner, key, end, np.repeat(base, splits) + split, step))
        rows = chunks[:, 2]
        query = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)
        each = np.repeat(splits, rows)
        merges = np.column_stack(
            (np.repeat(chunks[:, 1], rows) + query, np.repeat(base, rows) + query * each, each)
        )
        return items, merges

    def _splits(self, items: Positions) -> tuple[Positions, Positions]:
        """The first split that each of these items' rows see, and how many they see."""
        lowest = np.zeros(len(items), np.int64)
        if self._window is not None:
            lowest = np.maximum(items[:, 3] + 1 - self._window, 0)
        first = lowest // SPLIT_TOKENS
        return first, -(-(items[:, 2] + items[:, 3]) // SPLIT_TOKENS) - first
