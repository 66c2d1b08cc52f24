"""The kernels' maths in plain torch, a row at a time: slow, and right by inspection."""

import functools
from collections.abc import Callable

from torch import Tensor

from engine.kernels.lora import Lora
from engine.kernels.metadata import LoraBatch, SliceGroup


class ReferenceLora(Lora):
    """Multi-LoRA as a loop over rows and slices, in fp32."""

    def new_batch(self, capacity: int) -> LoraBatch:
        return LoraBatch(capacity, chunk_rows=1)

    def linear(self, group: SliceGroup, batch: LoraBatch, x: Tensor, y: Tensor) -> None:
        self._add(group, batch, y, lambda row, a: a @ x[row].float())

    def embedding(self, group: SliceGroup, batch: LoraBatch, tokens: Tensor, y: Tensor) -> None:
        self._add(group, batch, y, lambda row, a: a[tokens[row]])

    def _add(
        self,
        group: SliceGroup,
        batch: LoraBatch,
        y: Tensor,
        shrink: Callable[[int, Tensor], Tensor],
    ) -> None:
        for slot, start, length in batch.chunks():
            for row in batch.rows[start : start + length].tolist():
                self._add_row(group, slot, y[row], functools.partial(shrink, row))

    def _add_row(
        self, group: SliceGroup, slot: int, y: Tensor, shrink: Callable[[Tensor], Tensor]
    ) -> None:
        for module, column, width in zip(
            group.modules, group.columns, group.out_features, strict=True
        ):
            if self.table.rank[slot, module]:
                a, b = (matrix.float() for matrix in self.matrices(slot, module))
                update = b @ shrink(a) * float(self.table.scale[slot, module])
                y[column : column + width] += update.to(y.dtype)
