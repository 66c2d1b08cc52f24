"""Which adapters the rows of a tile use."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.fused_rows import FusedRows
from engine.kernels.metadata import LoraBatch

RANKS = np.array([8, 16, 17, 256], np.int32)


@given(slots=st.lists(st.integers(-1, 3), max_size=60), tile=st.sampled_from([16, 32]))
@settings(deadline=None, max_examples=40)
def test_a_tile_names_every_block_of_its_rows_adapters_once(slots, tile):
    batch, rows = LoraBatch(64, 16), FusedRows(64, 256)
    batch.build(slots)
    rows.build(batch, len(slots), tile, RANKS)
    assert rows.slots[: len(slots)].tolist() == slots
    for row, slot in enumerate(slots):
        assert slot < 0 or batch.rows[rows.places[row]] == row
    used = []
    for index, first in enumerate(range(0, len(slots), tile)):
        own = {slot for slot in slots[first : first + tile] if slot >= 0}
        used.append(len(own))
        due = [(slot, r) for slot in sorted(own) for r in range(0, RANKS[slot], 16)]
        begin, end = rows.starts[index : index + 2]
        assert [tuple(block) for block in rows.blocks[begin:end].tolist()] == due
    assert rows.most_adapters == max(used, default=0)


@pytest.mark.parametrize("rank", [1, 256])
def test_there_is_room_for_an_adapter_of_the_largest_rank_in_every_row(rank):
    batch, rows = LoraBatch(4, 16), FusedRows(4, rank)
    batch.build([0, 1, 2, 3])
    rows.build(batch, 4, 16, np.full(4, rank, np.int32))
    assert rows.starts[1] == len(rows.blocks)
