"""Multi-LoRA on CUDA: where the Triton kernels of `lora_triton` get their arguments."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from engine.kernels.int4_cuda import Adapters
from engine.kernels.lora import Lora
from engine.kernels.lora_triton import (
    RANK_TILE,
    SPLIT,
    TILES,
    WHOLE,
    Tile,
    choose_tile,
    expand,
    shrink,
)
from engine.kernels.metadata import AdapterDtype, LoraBatch, SliceGroup
from engine.types import AdapterLayout, ModuleSpec

MAX_SLICES = 3


class LoraGrid(NamedTuple):
    """How many programs are started, and of which kind. Those without work end at once."""

    chunks: int
    rank_tiles: int
    tile: Tile


class DeviceBatch(LoraBatch):
    """A `LoraBatch` whose buffer also lies on the device, at one address for its lifetime.

    `grid`: what is started, whatever the batch holds, as a captured graph must; None: as the batch
    asks.
    """

    def __init__(self, capacity: int, device: torch.device, fixed_tile: Tile | None) -> None:
        super().__init__(capacity, RANK_TILE)
        self.device_buffer = torch.zeros(self.buffer.size, dtype=torch.int32, device=device)
        self.tile = fixed_tile or SPLIT
        self.grid: LoraGrid | None = None
        self._fixed_tile = fixed_tile
        self._uploads = True

    def place(self, device_buffer: Tensor) -> None:
        """From now on the batch lies there, int32 [buffer.size]; the caller brings it over."""
        self.device_buffer = device_buffer
        self._uploads = False

    def decode_grid(self, chunks: int, rank: int) -> LoraGrid:
        """For any batch of at most so many chunks of adapters of at most this rank.

        A chunk has up to SPLIT.rows rows of one adapter.
        """
        return LoraGrid(chunks, triton.cdiv(rank, RANK_TILE), self._fixed_tile or SPLIT)

    def every_grid(self) -> list[LoraGrid]:
        """Between them they start each kernel that any batch may need."""
        tiles = [self._fixed_tile] if self._fixed_tile else TILES.values()
        return [LoraGrid(1, 1, tile) for tile in tiles]

    def build(self, row_slots: npt.ArrayLike) -> None:
        slots = np.asarray(row_slots, np.int32)
        used = slots[slots >= 0]
        if self.grid is not None:
            self.tile = self.grid.tile
        else:
            self.tile = self._fixed_tile or choose_tile(used.size, np.unique(used).size)
        self.chunk_rows = self.tile.rows
        super().build(slots)
        if self._uploads:
            self.device_buffer.copy_(torch.from_numpy(self.buffer))


class DeviceLora(Lora):
    """Multi-LoRA whose batches lie on a device."""

    @abstractmethod
    def new_batch(self, capacity: int) -> DeviceBatch: ...


@dataclass(frozen=True, slots=True)
class _DeviceGroup:
    slices: Tensor  # int32 [slices, 2]: module, columns
    tiles: Tensor  # int32 [tiles, 3]: slice, first column of the slice, first column of y


class TritonLora(DeviceLora):
    """x and y are bf16 or fp32 and contiguous in the last dimension.

    Dots are bf16 with fp32 sums for a bf16 arena, fp32 otherwise and under Triton's interpreter.
    """

    def __init__(
        self,
        arena: Tensor,
        modules: Sequence[ModuleSpec],
        *,
        slots: int,
        max_rows: int,
        max_rank: int,
        dtype: AdapterDtype,
        batch_invariant: bool = False,
    ) -> None:
        super().__init__(arena, modules, slots=slots, dtype=dtype)
        device = arena.device
        self._a = torch.zeros(slots, len(modules), dtype=torch.int64, device=device)
        self._b = torch.zeros_like(self._a)
        self._rank = torch.zeros(slots, len(modules), dtype=torch.int32, device=device)
        self._scale = torch.zeros(slots, len(modules), dtype=torch.float32, device=device)
        self.max_rows, self.max_rank = max_rows, max_rank
        self._hidden_stride = triton.cdiv(max_rank, RANK_TILE) * RANK_TILE
        # planes lie a batch's capacity apart, however few of its rows are used
        planes = SPLIT.splits * MAX_SLICES * max_rows
        self._hidden = torch.empty(planes * self._hidden_stride, device=device)
        self._fixed_tile = WHOLE if batch_invariant or dtype == "fp32" else None
        interpreted = isinstance(shrink, InterpretedFunction)
        self._compute = tl.bfloat16 if dtype == "bf16" and not interpreted else tl.float32
        self._groups: dict[tuple[SliceGroup, int], _DeviceGroup] = {}

    def new_batch(self, capacity: int) -> DeviceBatch:
        if capacity > self.max_rows:
            raise ValueError(f"a batch of {capacity} rows exceeds the bound of {self.max_rows}")
        return DeviceBatch(capacity, self.arena.device, self._fixed_tile)

    def activate(self, slot: int, layout: AdapterLayout, first_byte: int) -> None:
        super().activate(slot, layout, first_byte)
        self._upload(slot)

    def drop(self, slot: int) -> None:
        super().drop(slot)
        self._upload(slot)

    def linear(self, group: SliceGroup, batch: LoraBatch, x: Tensor, y: Tensor) -> None:
        if self._grid(batch).chunks:
            self.shrink(group, batch, x)
            self._expand(group, batch, self._hidden, y, tokens=None)

    def shrink(self, group: SliceGroup, batch: LoraBatch, x: Tensor) -> None:
        """x A^T of the adapter rows, for an expand to come. The batch must have a chunk."""
        device_batch, grid = _of_device(batch).device_buffer, self._grid(batch)
        slices, tile = len(group.modules), grid.tile
        shrink[(grid.chunks, slices * grid.rank_tiles, tile.splits)](
            x,
            x.stride(0),
            self.weights,
            self._hidden,
            self._hidden_stride,
            device_batch,
            batch.capacity,
            self._a,
            self._rank,
            len(self.modules),
            self._describe(group, tile.columns).slices,
            group.in_features,
            SLICES=slices,
            SPLITS=tile.splits,
            ROWS=tile.rows,
            RANKS=RANK_TILE,
            DEPTH=tile.depth,
            COMPUTE=self._compute,
            num_warps=tile.shrink_warps,
            num_stages=tile.shrink_stages,
        )

    def planes(self, batch: LoraBatch) -> int:
        """Of the shrink: into how many parts it cuts the input for this batch."""
        return self._grid(batch).tile.splits

    def fused(
        self, group: SliceGroup, batch: LoraBatch, x: Tensor, rows: Tensor, columns: int
    ) -> Adapters:
        """Shrinks, and leaves the expand to a product whose tiles have `columns` columns.

        rows: FusedRows.buffer on the device. Every slice must be a whole number of tiles.
        """
        self.shrink(group, batch, x)
        described = self._describe(group, columns)
        return Adapters(
            rows=rows,
            capacity=self.max_rows,
            hidden=self._hidden,
            hidden_stride=self._hidden_stride,
            plane_stride=len(group.modules) * batch.capacity * self._hidden_stride,
            batch_capacity=batch.capacity,
            weights=self.weights,
            b=self._b,
            rank=self._rank,
            scale=self._scale,
            modules=len(self.modules),
            group=described.slices,
            tiles=described.tiles,
            planes=self.planes(batch),
        )

    def embedding(self, group: SliceGroup, batch: LoraBatch, tokens: Tensor, y: Tensor) -> None:
        if self._grid(batch).chunks:
            self._expand(group, batch, self.weights, y, tokens)

    def _expand(
        self, group: SliceGroup, batch: LoraBatch, hidden: Tensor, y: Tensor, tokens: Tensor | None
    ) -> None:
        device_batch, (chunks, _, tile) = _of_device(batch).device_buffer, self._grid(batch)
        described = self._describe(group, tile.columns)
        expand[(chunks, len(described.tiles))](
            hidden,
            self._hidden_stride,
            len(group.modules) * batch.capacity * self._hidden_stride,
            self.weights,
            y,
            y.stride(0),
            device_batch if tokens is None else tokens,
            device_batch,
            batch.capacity,
            self._a,
            self._b,
            self._rank,
            self._scale,
            len(self.modules),
            described.slices,
            described.tiles,
            SPLITS=tile.splits if tokens is None else 1,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            RANKS=RANK_TILE,
            EMBEDDING=tokens is not None,
            COMPUTE=self._compute,
            num_warps=tile.expand_warps,
            num_stages=tile.expand_stages,
        )

    def _grid(self, batch: LoraBatch) -> LoraGrid:
        device_batch = _of_device(batch)
        if device_batch.grid is not None:
            return device_batch.grid
        rank = int(self.table.slot_rank[batch.adapters].max(initial=0))
        return LoraGrid(batch.chunk_count, triton.cdiv(rank, RANK_TILE), device_batch.tile)

    def _upload(self, slot: int) -> None:
        table = self.table
        for device, host in (
            (self._a, table.a),
            (self._b, table.b),
            (self._rank, table.rank),
            (self._scale, table.scale),
        ):
            device[slot].copy_(torch.from_numpy(host[slot]))

    def _describe(self, group: SliceGroup, columns: int) -> _DeviceGroup:
        """For tiles of so many columns."""
        described = self._groups.get((group, columns))
        if described is None:
            slices = list(zip(group.modules, group.out_features, strict=True))
            tiles = [
                (index, first, column + first)
                for index, (column, width) in enumerate(
                    zip(group.columns, group.out_features, strict=True)
                )
                for first in range(0, width, columns)
            ]
            device = self.arena.device
            described = _DeviceGroup(
                torch.tensor(slices, dtype=torch.int32, device=device),
                torch.tensor(tiles, dtype=torch.int32, device=device),
            )
            self._groups[group, columns] = described
        return described


def _of_device(batch: LoraBatch) -> DeviceBatch:
    if not isinstance(batch, DeviceBatch):
        raise TypeError("the batch was not made by this face's new_batch")
    return batch
