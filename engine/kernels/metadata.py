"""What the multi-LoRA kernels are told: which rows use which adapter, and where adapters lie.

Plain numpy, shared by every face of the operation. `LoraBatch` is rebuilt once a step, the
`AdapterTable` changes when an adapter arrives or leaves; both keep their buffers, so that a
captured CUDA graph goes on reading the same addresses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.types import AdapterLayout, ModuleSpec

AdapterDtype = Literal["bf16", "fp32"]
ITEM_BYTES: dict[str, int] = {"bf16": 2, "fp32": 4}
BASE_ROW = -1
"""The slot of a row that uses the base model alone."""
ALIGNMENT = 64
"""Bytes: every matrix begins on a multiple, so that a device may load it in wide words."""


@dataclass(frozen=True, slots=True)
class SliceGroup:
    """Modules that read one input and write neighbouring columns of one output.

    Slice s writes columns `column(s) .. column(s) + out_features[s]` of y [T, sum out_features].
    """

    modules: tuple[int, ...]  # indices into ModelDescription.modules
    in_features: int
    out_features: tuple[int, ...]

    @property
    def width(self) -> int:
        """Columns of the group's output."""
        return sum(self.out_features)

    @property
    def columns(self) -> tuple[int, ...]:
        """First output column of every slice."""
        return tuple(sum(self.out_features[:index]) for index in range(len(self.out_features)))

    @classmethod
    def of(cls, modules: Sequence[ModuleSpec], indices: Sequence[int]) -> "SliceGroup":
        """The group of `modules[i]` for i in `indices`, in that order.

        Raises ValueError when they do not share an input width.
        """
        chosen = [modules[index] for index in indices]
        if len({module.in_features for module in chosen}) != 1:
            raise ValueError(f"modules {[module.name for module in chosen]} differ in input width")
        return cls(
            tuple(indices), chosen[0].in_features, tuple(module.out_features for module in chosen)
        )


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The four slice groups of one transformer block, in the order of the forward."""

    qkv: SliceGroup
    o: SliceGroup
    gate_up: SliceGroup
    down: SliceGroup


def layer_groups(modules: Sequence[ModuleSpec], layer: int) -> LayerGroups:
    """The slice groups of one block. Raises KeyError when the block lacks one of the linears."""
    index = {module.target: i for i, module in enumerate(modules) if module.layer == layer}

    def group(*targets: str) -> SliceGroup:
        return SliceGroup.of(modules, [index[target] for target in targets])

    return LayerGroups(
        qkv=group("q_proj", "k_proj", "v_proj"),
        o=group("o_proj"),
        gate_up=group("gate_proj", "up_proj"),
        down=group("down_proj"),
    )


class Chunk(NamedTuple):
    """Neighbouring entries of `LoraBatch.rows` that use one adapter."""

    slot: int
    start: int
    length: int


class LoraBatch:
    """Rows of one flattened batch, sorted by adapter and cut into chunks of one adapter each.

    Rows of the base model are in no chunk. `buffer` is int32
    [1 + 4 * capacity] = chunk count | rows | chunk start | chunk length | chunk slot, one transfer
    for a device. Entries past the counts are stale and must not be read.
    """

    def __init__(self, capacity: int, chunk_rows: int) -> None:
        """`capacity`: most rows of a batch; `chunk_rows`: most rows of a chunk."""
        if capacity < 1 or chunk_rows < 1:
            raise ValueError("a batch needs room for a row, and a chunk holds at least one")
        self.capacity = capacity
        self.chunk_rows = chunk_rows
        self.buffer: npt.NDArray[np.int32] = np.zeros(1 + 4 * capacity, np.int32)
        self.rows, self.starts, self.lengths, self.slots = self.buffer[1:].reshape(4, capacity)
        self.adapter_rows = 0
        self.adapters: list[int] = []  # the distinct slots, ascending
        self._built: npt.NDArray[np.int32] = np.zeros(0, np.int32)

    @property
    def chunk_count(self) -> int:
        return int(self.buffer[0])

    def chunks(self) -> list[Chunk]:
        """The chunks as plain numbers."""
        return [
            Chunk(int(self.slots[i]), int(self.starts[i]), int(self.lengths[i]))
            for i in range(self.chunk_count)
        ]

    def build(self, row_slots: npt.ArrayLike) -> None:
        """Describes a new batch. `row_slots`: [T] adapter slot of every row, `BASE_ROW` for none.

        Raises ValueError when T exceeds the capacity.
        """
        slots = np.asarray(row_slots, np.int32)
        if slots.size > self.capacity:
            raise ValueError(f"{slots.size} rows exceed the batch's capacity of {self.capacity}")
        if np.array_equal(slots, self._built):
            return  # as in most steps of a decode
        self._built = slots.copy()
        order = np.argsort(slots, kind="stable")[np.count_nonzero(slots < 0) :]
        self.adapter_rows = order.size
        self.rows[: order.size] = order
        ordered = slots[order]
        first = np.flatnonzero(np.diff(ordered, prepend=BASE_ROW))
        self.adapters = ordered[first].tolist()
        length = np.diff(first, append=order.size)
        pieces = -(-length // self.chunk_rows)
        total = int(pieces.sum())
        piece = np.arange(total) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        offset = piece * self.chunk_rows
        self.buffer[0] = total
        self.starts[:total] = np.repeat(first, pieces) + offset
        self.lengths[:total] = np.minimum(np.repeat(length, pieces) - offset, self.chunk_rows)
        self.slots[:total] = np.repeat(ordered[first], pieces)


class AdapterTable:
    """Where the matrices of every active adapter lie in the arena: [slot, module] each.

    `a` and `b` are offsets in elements of the adapter dtype from the arena's first byte, 64 bits
    wide; a module that the adapter does not change has rank 0 and is never read.
    """

    def __init__(self, slots: int, modules: int, dtype: AdapterDtype) -> None:
        self.dtype = dtype
        self.a: npt.NDArray[np.int64] = np.zeros((slots, modules), np.int64)
        self.b: npt.NDArray[np.int64] = np.zeros((slots, modules), np.int64)
        self.rank: npt.NDArray[np.int32] = np.zeros((slots, modules), np.int32)
        self.scale: npt.NDArray[np.float32] = np.zeros((slots, modules), np.float32)
        self.slot_rank: npt.NDArray[np.int32] = np.zeros(slots, np.int32)

    def activate(self, slot: int, layout: AdapterLayout, first_byte: int) -> None:
        """Names the adapter that begins at `first_byte` of the arena; again after a move.

        Raises ValueError when the layout is in another dtype or misaligned for it.
        """
        if layout.dtype != self.dtype:
            raise ValueError(f"adapter is {layout.dtype}, the arena holds {self.dtype}")
        index = np.array([module.module for module in layout.modules], np.intp)
        starts = np.array([(m.a_offset, m.b_offset) for m in layout.modules], np.int64)
        starts = starts.reshape(-1, 2) + first_byte
        if np.any(starts % ALIGNMENT):
            raise ValueError(f"adapter matrices must lie on multiples of {ALIGNMENT} bytes")
        self.drop(slot)
        self.a[slot, index], self.b[slot, index] = (starts // ITEM_BYTES[self.dtype]).T
        self.rank[slot, index] = [module.rank for module in layout.modules]
        self.scale[slot, index] = [module.scale for module in layout.modules]
        self.slot_rank[slot] = self.rank[slot].max(initial=0)

    def drop(self, slot: int) -> None:
        """Forgets a slot: all its modules are absent."""
        self.rank[slot] = 0
        self.slot_rank[slot] = 0
