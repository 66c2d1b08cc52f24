"""A 4-bit linear and its rows' adapters on CUDA, in one kernel or in two as `fuse` says."""

import torch
from torch import Tensor

from engine.kernels.fuse import fusable, fuses
from engine.kernels.fused_rows import FusedRows
from engine.kernels.int4 import PackedInt4
from engine.kernels.int4_cuda import TritonInt4
from engine.kernels.lora_cuda import TritonLora
from engine.kernels.metadata import LoraBatch, SliceGroup


class Int4LoraLinear:
    """Calls come from one thread at a time."""

    def __init__(self, gemm: TritonInt4, lora: TritonLora) -> None:
        self._gemm = gemm
        self._lora = lora
        self._exact = lora.table.dtype == "fp32"
        self._rows: dict[int, tuple[FusedRows, Tensor]] = {}  # by rows of a tile

    def new_step(self, batch: LoraBatch, rows: int, weight: PackedInt4) -> None:
        """Describes a step of `rows` rows, once for the weights of all layers like this one."""
        tile = self._gemm.tile(rows, weight, self._lora.planes(batch))
        if tile.rows not in self._rows:
            fused = FusedRows(self._lora.max_rows, self._lora.max_rank)
            buffer = torch.zeros(
                fused.buffer.size, dtype=torch.int32, device=self._lora.arena.device
            )
            self._rows[tile.rows] = fused, buffer
        fused, buffer = self._rows[tile.rows]
        fused.build(batch, rows, tile.rows, self._lora.table.slot_rank)
        buffer.copy_(torch.from_numpy(fused.buffer))

    def linear(
        self,
        x: Tensor,
        weight: PackedInt4,
        group: SliceGroup,
        batch: LoraBatch,
        *,
        fuse: bool | None = None,
    ) -> Tensor:
        """x W^T and each row's own update: [T, in] -> [T, out].

        `fuse`: None leaves it to the table. Raises ValueError when it is asked for and cannot be.
        """
        tile = self._gemm.tile(x.shape[0], weight, self._lora.planes(batch))
        if fuse and not fusable(group, tile.columns):
            raise ValueError(f"tiles of {tile.columns} columns lie across the slices of {group}")
        if fuse and self._exact:
            raise ValueError("fp32 adapters are not fused: the product is in half precision")
        if fuse is None:
            fuse = not self._exact and fuses(
                group, tile.columns, self._rows[tile.rows][0].most_adapters
            )
        if not batch.chunk_count:
            return self._gemm.linear(x, weight)
        if fuse:
            rows = self._rows[tile.rows][1]
            added = self._lora.fused(group, batch, x, rows, tile.columns)
            return self._gemm.linear_with(tile, x, weight, added)
        y = self._gemm.linear(x, weight)
        self._lora.linear(group, batch, x, y)
        return y
