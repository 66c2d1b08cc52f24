"""Multi-LoRA: adds every row's own low-rank update to a linear's output, in one mixed batch.

    y[t, slice] += scale * (x[t] A^T) B^T      A [rank, in], B [out, rank] of row t's adapter

Adapters are read at their true rank from the one byte arena that also holds the KV cache. Rows of
the base model are left bitwise untouched. The faces of the operation share this interface: Triton
(`lora_cuda`), one compiled pass on the CPU (`lora_cpu`) or, where numba is not installed, torch
operations (`lora_torch`), and the plain reference (`reference`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.kernels.metadata import AdapterDtype, AdapterTable, LoraBatch, SliceGroup
from engine.types import AdapterLayout, ModuleSpec

if TYPE_CHECKING:
    from engine.kernels.lora_cpu import CompiledLora
    from engine.kernels.lora_torch import TorchLora

TORCH_DTYPE: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Lora(ABC):
    """The adapters of one arena and the two operations that apply them.

    A step builds one `LoraBatch` for its flattened rows (and one for the rows that reach the
    lm_head) and passes it to every call. Calls come from one thread at a time.
    """

    def __init__(
        self, arena: Tensor, modules: Sequence[ModuleSpec], *, slots: int, dtype: AdapterDtype
    ) -> None:
        """`arena`: uint8 [bytes], never reallocated. `slots`: most adapters active at once."""
        self.arena = arena
        self.modules = tuple(modules)
        self.table = AdapterTable(slots, len(modules), dtype)
        self.weights = arena.view(TORCH_DTYPE[dtype])  # [elements]

    def activate(self, slot: int, layout: AdapterLayout, first_byte: int) -> None:
        """Makes the adapter whose blob begins at `first_byte` of the arena callable by `slot`.

        Called when its copy is complete, and again after a move.
        """
        self.table.activate(slot, layout, first_byte)

    def drop(self, slot: int) -> None:
        """Forgets a slot. Its bytes may be overwritten afterwards."""
        self.table.drop(slot)

    @abstractmethod
    def new_batch(self, capacity: int) -> LoraBatch:
        """An empty batch of at most `capacity` rows; `build` it anew every step."""

    @abstractmethod
    def linear(self, group: SliceGroup, batch: LoraBatch, x: Tensor, y: Tensor) -> None:
        """y[:, slice] += scale * (x A^T) B^T for the adapter rows, in place.

        x: [T, in] the group's common input, y: [T, group.width], both contiguous in the last
        dimension; fp32 on the CPU, bf16 or fp32 on a GPU.
        """

    @abstractmethod
    def embedding(self, group: SliceGroup, batch: LoraBatch, tokens: Tensor, y: Tensor) -> None:
        """y += scale * A[token] B^T for the adapter rows, A [vocab, rank], B [hidden, rank].

        tokens: [T] int64, y: [T, hidden]. `group` is that of `embed_tokens` alone.
        """

    def matrices(self, slot: int, module: int) -> tuple[Tensor, Tensor]:
        """Views of A and B as they are stored: A [rank, in], B [out, rank].

        An embedding's A is [vocab, rank]. A module that the adapter does not change has rank 0.
        """
        spec, rank = self.modules[module], int(self.table.rank[slot, module])
        a_start, b_start = int(self.table.a[slot, module]), int(self.table.b[slot, module])
        a = self.weights[a_start : a_start + rank * spec.in_features]
        b = self.weights[b_start : b_start + rank * spec.out_features].view(-1, rank)
        embedding = spec.target == "embed_tokens"
        return (a.view(-1, rank) if embedding else a.view(rank, spec.in_features)), b


def open_lora(
    arena: Tensor,
    modules: Sequence[ModuleSpec],
    *,
    slots: int,
    max_rows: int,
    max_rank: int,
    dtype: AdapterDtype,
    batch_invariant: bool = False,
    compiled: int | None = None,
) -> Lora:
    """The fastest face for the arena's device.

    `max_rows` bounds every batch and `max_rank` every adapter. With `batch_invariant`, no bit of a
    row's update depends on the rows beside it. `compiled`: the address of the native library's pass
    over bf16 adapters on the CPU; default: numba's.
    """
    if arena.is_cuda:
        from engine.kernels.lora_cuda import TritonLora

        return TritonLora(
            arena,
            modules,
            slots=slots,
            max_rows=max_rows,
            max_rank=max_rank,
            dtype=dtype,
            batch_invariant=batch_invariant,
        )
    if compiled is not None and dtype == "bf16":
        from engine.kernels.lora_cpu import CompiledLora

        return CompiledLora(
            arena,
            modules,
            slots=slots,
            dtype=dtype,
            batch_invariant=batch_invariant,
            work=compiled,
            max_rank=max_rank,
        )
    return _cpu_face()(arena, modules, slots=slots, dtype=dtype, batch_invariant=batch_invariant)


def _cpu_face() -> "type[CompiledLora | TorchLora]":
    from engine.kernels.lora_torch import TorchLora

    try:
        from engine.kernels.lora_cpu import CompiledLora, thread_pool
    except ModuleNotFoundError as error:
        if error.name not in ("numba", "llvmlite"):
            raise
        return TorchLora
    return TorchLora if thread_pool() is None else CompiledLora
