"""The 4-bit linear on CUDA: where the kernel of `int4_triton` gets its arguments."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from engine.kernels.dtypes import compute_dtype
from engine.kernels.int4 import COLUMNS, Int4Gemm, PackedInt4
from engine.kernels.int4_triton import (
    MAX_SPLIT_ROWS,
    ROWS_64,
    TILES,
    Int4Tile,
    choose_tile,
    int4_linear,
)


class Adapters(NamedTuple):
    """What the kernel needs to add the rows' adapters: its own arguments, in order."""

    rows: Tensor  # FusedRows.buffer on the device
    capacity: int
    hidden: Tensor  # of the shrink
    hidden_stride: int
    plane_stride: int
    batch_capacity: int
    weights: Tensor
    b: Tensor
    rank: Tensor
    scale: Tensor
    modules: int
    group: Tensor
    tiles: Tensor
    planes: int


class TritonInt4(Int4Gemm):
    """x is bf16 or fp16, as the scales; sums are fp32."""

    def __init__(
        self, device: torch.device, *, max_out_features: int, batch_invariant: bool = False
    ) -> None:
        """`max_out_features`: of any weight it is called with."""
        self._batch_invariant = batch_invariant
        self._interpreted = isinstance(int4_linear, InterpretedFunction)
        self.capability = 0  # of the card; 0: none
        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            self.capability = 10 * major + minor
        split = [tile for tile in TILES.values() if tile.splits > 1]
        self._max_tiles = max(triton.cdiv(max_out_features, tile.columns) for tile in split)
        numbers = max(
            triton.cdiv(max_out_features, tile.columns) * tile.columns * tile.rows * tile.splits
            for tile in split
        )
        self._parts = torch.empty(numbers, device=device)
        self._arrived = torch.zeros(self._max_tiles, dtype=torch.int32, device=device)

    def linear(self, x: Tensor, weight: PackedInt4) -> Tensor:
        return self.linear_with(self.tile(x.shape[0], weight), x, weight)

    def tile(self, rows: int, weight: PackedInt4, planes: int = 0) -> Int4Tile:
        """How `rows` rows are multiplied. `planes`: see choose_tile."""
        if self._batch_invariant:
            return ROWS_64
        return choose_tile(rows, weight.group, self.capability, planes)

    def linear_with(
        self,
        tile: Int4Tile,
        x: Tensor,
        weight: PackedInt4,
        adapters: Adapters | None = None,
        *,
        by_bits: bool = True,
    ) -> Tensor:
        """As `linear`, by a given tile, with the rows' adapters where they are given.

        `by_bits`: see int4_triton; false only to compare.
        """
        rows = x.shape[0]
        y = torch.empty(rows, weight.out_features, dtype=x.dtype, device=x.device)
        if not rows:
            return y
        grid = (
            triton.cdiv(weight.out_features, tile.columns),
            triton.cdiv(rows, tile.rows),
            tile.splits,
        )
        if tile.splits > 1 and (rows > MAX_SPLIT_ROWS or grid[0] * grid[1] > self._max_tiles):
            raise ValueError("this tile splits the input of more outputs than there is room for")
        zero = weight.scale if weight.zero is None else weight.zero
        nothing = self._arrived
        added = adapters or Adapters(
            nothing, 0, self._parts, 0, 0, 0, x, nothing, nothing, self._parts, 0, nothing,
            nothing, planes=0,
        )  # fmt: skip
        int4_linear[grid](
            x, x.stride(0), weight.words, weight.scale, zero, y, y.stride(0), self._parts,
            self._arrived, rows, weight.out_features, weight.padded[0], weight.in_features,
            *added[:-1],
            PLANES=added.planes,
            GROUP=weight.group,
            ZERO=weight.zero is not None,
            EVEN=weight.in_features % COLUMNS == 0,
            SCALE_SUMS=tile.scale_sums and weight.zero is None,
            SPLITS=tile.splits,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            BITS=by_bits and not self._interpreted,
            COMPUTE=compute_dtype(int4_linear, x.dtype),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )  # fmt: skip
        return y
