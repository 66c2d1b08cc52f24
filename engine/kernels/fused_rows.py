"""Which adapters the rows of a tile use: what a product needs to add their updates itself.

Plain numpy, rebuilt once a step for one size of tile; the buffer keeps its address. Rows lie in
their own order here, not sorted by adapter as in LoraBatch.
"""

import numpy as np
import numpy.typing as npt

from engine.kernels.metadata import BASE_ROW, LoraBatch

RANK_BLOCK = 16


class FusedRows:
    """`buffer` is int32 [3 * capacity + 1 + 2 * blocks]:

    slot of every row | its place among the batch's sorted rows | first block of every tile, and the
    end | blocks as (slot, first rank). A block is 16 ranks of one adapter; those of a tile are of
    the adapters that its rows use, each adapter once.
    """

    def __init__(self, capacity: int, max_rank: int) -> None:
        """`capacity`: most rows of a batch."""
        self.capacity = capacity
        blocks = capacity * -(-max_rank // RANK_BLOCK)
        self.buffer: npt.NDArray[np.int32] = np.zeros(3 * capacity + 1 + 2 * blocks, np.int32)
        self.slots = self.buffer[:capacity]
        self.places = self.buffer[capacity : 2 * capacity]
        self.starts = self.buffer[2 * capacity : 3 * capacity + 1]
        self.blocks = self.buffer[3 * capacity + 1 :].reshape(-1, 2)
        self.most_adapters = 0  # of any tile

    def build(
        self, batch: LoraBatch, rows: int, tile_rows: int, slot_rank: npt.NDArray[np.int32]
    ) -> None:
        """Describes a batch of `rows` rows for tiles of `tile_rows`. slot_rank: largest a slot."""
        order = batch.rows[: batch.adapter_rows]
        lengths = batch.lengths[: batch.chunk_count]
        self.slots[:rows] = BASE_ROW
        self.slots[order] = np.repeat(batch.slots[: batch.chunk_count], lengths)
        self.places[order] = np.arange(order.size)
        tiles = -(-rows // tile_rows)
        pairs = np.unique(np.stack((order // tile_rows, self.slots[order]), axis=1), axis=0)
        count = -(-slot_rank[pairs[:, 1]] // RANK_BLOCK)
        first = np.cumsum(count) - count
        total = int(count.sum())
        block = self.blocks[:total]
        block[:, 0] = np.repeat(pairs[:, 1], count)
        block[:, 1] = (np.arange(total) - np.repeat(first, count)) * RANK_BLOCK
        ends = np.append(first, total)
        self.starts[: tiles + 1] = ends[np.searchsorted(pairs[:, 0], np.arange(tiles + 1))]
        self.most_adapters = int(np.bincount(pairs[:, 0]).max(initial=0))
