"""What the multi-LoRA kernels are told: chunks of one adapter, and the table of matrices."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.metadata import AdapterTable, LoraBatch, SliceGroup, layer_groups
from engine.types import LAYER_TARGETS, AdapterLayout, AdapterModule, ModuleSpec


def layer(index: int) -> list[ModuleSpec]:
    shapes = {"k_proj": (8, 4), "v_proj": (8, 4), "gate_proj": (8, 32), "up_proj": (8, 32)}
    shapes["down_proj"] = (32, 8)
    return [
        ModuleSpec(f"{index}.{target}", target, index, *shapes.get(target, (8, 8)), 1.0)
        for target in LAYER_TARGETS
    ]


def layout(*modules: AdapterModule, dtype="bf16") -> AdapterLayout:
    return AdapterLayout(modules, dtype, max((m.rank for m in modules), default=0), 4096)


class TestLoraBatch:
    @given(
        row_slots=st.lists(st.integers(-1, 6), max_size=60),
        chunk_rows=st.integers(1, 20),
    )
    def test_chunks_hold_every_adapter_row_once_and_no_base_row(self, row_slots, chunk_rows):
        batch = LoraBatch(60, chunk_rows)
        batch.build([0] * 60)  # what a step before left behind
        batch.build(row_slots)
        seen = []
        for slot, start, length in batch.chunks():
            rows = batch.rows[start : start + length].tolist()
            assert 1 <= length <= chunk_rows
            assert {row_slots[row] for row in rows} == {slot}
            assert rows == sorted(rows)
            seen += rows
        assert sorted(seen) == [row for row, slot in enumerate(row_slots) if slot >= 0]
        assert batch.adapter_rows == len(seen)
        assert batch.adapters == sorted(set(row_slots) - {-1})

    @given(row_slots=st.lists(st.integers(-1, 6), min_size=1, max_size=60))
    def test_only_the_last_chunk_of_an_adapter_is_not_full(self, row_slots):
        batch = LoraBatch(60, 4)
        batch.build(row_slots)
        chunks = batch.chunks()
        for before, after in itertools.pairwise(chunks):
            if before.slot == after.slot:
                assert before.length == 4

    def test_a_batch_that_comes_again_after_another_is_described_again(self):
        batch = LoraBatch(4, 4)
        for slots, chunks in (([2, 2], [(2, 0, 2)]), ([5], [(5, 0, 1)]), ([2, 2], [(2, 0, 2)])):
            for _ in range(2):
                batch.build(slots)
                assert batch.chunks() == chunks
                assert batch.adapters == [slots[0]]

    def test_a_batch_without_rows_has_no_chunks(self):
        batch = LoraBatch(4, 4)
        batch.build([])
        assert batch.chunks() == []

    def test_more_rows_than_the_capacity_are_refused(self):
        with pytest.raises(ValueError, match="5 rows exceed"):
            LoraBatch(4, 4).build([0] * 5)

    def test_the_buffers_stay_where_they_are(self):
        batch = LoraBatch(8, 4)
        before = batch.buffer.ctypes.data
        batch.build([1, 0, 1])
        batch.build([2])
        assert batch.buffer.ctypes.data == before
        assert np.shares_memory(batch.slots, batch.buffer)


class TestAdapterTable:
    def test_offsets_are_elements_of_the_arena(self):
        table = AdapterTable(2, 3, "bf16")
        table.activate(1, layout(AdapterModule(2, 8, 0.5, 64, 640)), first_byte=1 << 40)
        assert table.a[1, 2] == ((1 << 40) + 64) // 2
        assert table.b[1, 2] == ((1 << 40) + 640) // 2
        assert table.rank[1].tolist() == [0, 0, 8]
        assert table.scale[1, 2] == 0.5
        assert table.slot_rank.tolist() == [0, 8]

    def test_a_later_adapter_keeps_nothing_of_the_slots_last_one(self):
        table = AdapterTable(1, 3, "fp32")
        table.activate(0, layout(AdapterModule(0, 64, 1.0, 0, 64), dtype="fp32"), 0)
        table.activate(0, layout(AdapterModule(1, 4, 1.0, 0, 64), dtype="fp32"), 0)
        assert table.rank[0].tolist() == [0, 4, 0]
        assert table.slot_rank[0] == 4

    def test_a_dropped_slot_has_no_modules(self):
        table = AdapterTable(1, 1, "bf16")
        table.activate(0, layout(AdapterModule(0, 64, 1.0, 0, 64)), 0)
        table.drop(0)
        assert not table.rank.any()
        assert not table.slot_rank.any()

    def test_an_adapter_without_modules_is_nothing(self):
        table = AdapterTable(1, 1, "bf16")
        table.activate(0, layout(), 0)
        assert table.slot_rank[0] == 0

    @pytest.mark.parametrize(
        ("dtype", "first_byte", "reason"), [("fp32", 0, "holds bf16"), ("bf16", 32, "multiples")]
    )
    def test_what_a_kernel_could_not_read_is_refused(self, dtype, first_byte, reason):
        table = AdapterTable(1, 1, "bf16")
        with pytest.raises(ValueError, match=reason):
            table.activate(0, layout(AdapterModule(0, 4, 1.0, 0, 64), dtype=dtype), first_byte)


class TestSliceGroups:
    def test_a_layer_has_four_groups_of_what_shares_an_input(self):
        groups = layer_groups([*layer(0), *layer(1)], 1)
        assert groups.qkv == SliceGroup((7, 8, 9), 8, (8, 4, 4))
        assert groups.qkv.columns == (0, 8, 12)
        assert groups.qkv.width == 16
        assert groups.o == SliceGroup((10,), 8, (8,))
        assert groups.gate_up == SliceGroup((11, 12), 8, (32, 32))
        assert groups.down == SliceGroup((13,), 32, (8,))

    def test_modules_of_different_inputs_make_no_group(self):
        with pytest.raises(ValueError, match="input width"):
            SliceGroup.of(layer(0), (0, 6))
