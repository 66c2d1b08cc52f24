"""The operations that a step on the device is made of, as one object: Triton's in production.

Tests give the runner plain faces instead, which read the same buffers on the CPU.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.kernels import pointwise_triton, sample_triton
from engine.kernels.attention_cuda import HEAD_SIZES, AttentionGrid, TritonAttention
from engine.kernels.int4 import Int4Gemm
from engine.kernels.int4_cuda import TritonInt4
from engine.kernels.lora_cuda import DeviceLora, TritonLora
from engine.kernels.metadata import AdapterDtype
from engine.kernels.paged_work import PagedWork
from engine.kernels.pointwise import HeadNorm
from engine.model.attention import QueryChunk
from engine.model.kv_cache import KvCache
from engine.types import ModuleSpec


class DeviceAttention(Protocol):
    """A step's queries on the device; see TritonAttention."""

    work: PagedWork
    grid: AttentionGrid | None

    def place(self, buffer: Tensor) -> None: ...

    def build(self, chunks: Sequence[QueryChunk]) -> None: ...

    def decode_grid(self, rows: int) -> AttentionGrid: ...

    def every_grid(self) -> AttentionGrid: ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class Faces(ABC):
    """The pointwise operations and `sample` are those of `engine.kernels` by the same names."""

    head_sizes: tuple[int, ...] | None
    """Sizes of a head that attention takes; None: any."""

    @abstractmethod
    def lora(
        self,
        arena: Tensor,
        modules: Sequence[ModuleSpec],
        *,
        slots: int,
        max_rows: int,
        max_rank: int,
        dtype: AdapterDtype,
        batch_invariant: bool,
    ) -> DeviceLora: ...

    @abstractmethod
    def attention(
        self,
        cache: KvCache,
        *,
        max_rows: int,
        max_blocks: int,
        max_partials: int,
        dtype: torch.dtype,
        batch_invariant: bool,
    ) -> DeviceAttention: ...

    @abstractmethod
    def int4(
        self, device: torch.device, *, max_out_features: int, batch_invariant: bool
    ) -> Int4Gemm: ...

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    @abstractmethod
    def add_rms_norm(
        self, hidden: Tensor, update: Tensor, weight: Tensor, eps: float
    ) -> Tensor: ...

    @abstractmethod
    def rotate_and_write(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        token_rows: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        heads: int,
        norm: HeadNorm | None,
    ) -> Tensor: ...

    @abstractmethod
    def silu_gate(self, gate_up: Tensor) -> Tensor: ...

    @abstractmethod
    def sample(self, logits: Tensor, asked: Tensor) -> Tensor: ...


class TritonFaces(Faces):
    head_sizes = HEAD_SIZES

    def lora(
        self,
        arena: Tensor,
        modules: Sequence[ModuleSpec],
        *,
        slots: int,
        max_rows: int,
        max_rank: int,
        dtype: AdapterDtype,
        batch_invariant: bool,
    ) -> TritonLora:
        return TritonLora(
            arena,
            modules,
            slots=slots,
            max_rows=max_rows,
            max_rank=max_rank,
            dtype=dtype,
            batch_invariant=batch_invariant,
        )

    def attention(
        self,
        cache: KvCache,
        *,
        max_rows: int,
        max_blocks: int,
        max_partials: int,
        dtype: torch.dtype,
        batch_invariant: bool,
    ) -> TritonAttention:
        return TritonAttention(
            cache,
            max_rows=max_rows,
            max_blocks=max_blocks,
            max_partials=max_partials,
            dtype=dtype,
            batch_invariant=batch_invariant,
        )

    def int4(
        self, device: torch.device, *, max_out_features: int, batch_invariant: bool
    ) -> TritonInt4:
        return TritonInt4(
            device, max_out_features=max_out_features, batch_invariant=batch_invariant
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return pointwise_triton.rms_norm(x, weight, eps)

    def add_rms_norm(self, hidden: Tensor, update: Tensor, weight: Tensor, eps: float) -> Tensor:
        return pointwise_triton.add_rms_norm(hidden, update, weight, eps)

    def rotate_and_write(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        token_rows: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        heads: int,
        norm: HeadNorm | None,
    ) -> Tensor:
        return pointwise_triton.rotate_and_write(
            qkv, cos, sin, token_rows, keys, values, heads=heads, norm=norm
        )

    def silu_gate(self, gate_up: Tensor) -> Tensor:
        return pointwise_triton.silu_gate(gate_up)

    def sample(self, logits: Tensor, asked: Tensor) -> Tensor:
        return sample_triton.sample(logits, asked)
