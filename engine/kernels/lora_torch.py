"""Multi-LoRA on the CPU in torch operations: two matrix products a chunk and slice.

Right everywhere torch runs. `lora_numba` does the same in one pass and is several times faster at
decode, so this face serves only where numba is not installed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.lora import Lora
from engine.kernels.metadata import AdapterDtype, LoraBatch, SliceGroup
from engine.types import AdapterLayout, ModuleSpec


class TorchLora(Lora):
    """Chunks are whole adapters, or single rows where a row must not depend on its neighbours."""

    def __init__(
        self,
        arena: Tensor,
        modules: Sequence[ModuleSpec],
        *,
        slots: int,
        dtype: AdapterDtype,
        batch_invariant: bool = False,
    ) -> None:
        super().__init__(arena, modules, slots=slots, dtype=dtype)
        self._batch_invariant = batch_invariant
        self._views: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}  # slot, module -> A, B

    def new_batch(self, capacity: int) -> LoraBatch:
        return LoraBatch(capacity, 1 if self._batch_invariant else capacity)

    def activate(self, slot: int, layout: AdapterLayout, first_byte: int) -> None:
        super().activate(slot, layout, first_byte)
        self._views[slot] = {
            module.module: self.matrices(slot, module.module)
            for module in layout.modules
            if module.rank
        }

    def drop(self, slot: int) -> None:
        super().drop(slot)
        self._views.pop(slot, None)

    def linear(self, group: SliceGroup, batch: LoraBatch, x: Tensor, y: Tensor) -> None:
        for slot, start, length in batch.chunks():
            rows = torch.from_numpy(batch.rows[start : start + length])
            chunk = x[rows]
            for module, columns in self._present(group, slot, y):
                a, b = self._views[slot][module]
                self._expand(columns, rows, chunk @ a.float().T, b, slot, module)

    def embedding(self, group: SliceGroup, batch: LoraBatch, tokens: Tensor, y: Tensor) -> None:
        for slot, start, length in batch.chunks():
            rows = torch.from_numpy(batch.rows[start : start + length])
            for module, columns in self._present(group, slot, y):
                a, b = self._views[slot][module]
                self._expand(columns, rows, a[tokens[rows]].float(), b, slot, module)

    def _present(self, group: SliceGroup, slot: int, y: Tensor) -> list[tuple[int, Tensor]]:
        """(module, its columns of y) of the slices that the adapter changes."""
        views = self._views.get(slot, {})
        return [
            (module, y[:, column : column + width])
            for module, column, width in zip(
                group.modules, group.columns, group.out_features, strict=True
            )
            if module in views
        ]

    def _expand(
        self, columns: Tensor, rows: Tensor, hidden: Tensor, b: Tensor, slot: int, module: int
    ) -> None:
        scale = float(self.table.scale[slot, module])
        columns.index_add_(0, rows, hidden @ b.float().T, alpha=scale)
