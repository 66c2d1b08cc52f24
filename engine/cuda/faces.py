"""The operations that a step on the device is made of, as one object: Triton's in production.

Tests give the runner plain faces instead, which read the same buffers on the CPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.kernels import pointwise_triton, sample_triton
from engine.kernels.attention_cuda import HEAD_SIZES, AttentionGrid, TritonAttention
from engine.kernels.int4 import Int4Gemm
from engine.kernels.int4_cuda import TritonInt4
from engine.kernels.lora_cuda import DeviceLora, TritonLora
from engine.kernels.paged_work import PagedWork
from engine.model.attention import QueryChunk


class DeviceAttention(Protocol):
    """A step's queries on the device; see TritonAttention."""

    work: PagedWork
    grid: AttentionGrid | None

    def place(self, buffer: Tensor) -> None: ...

    def build(self, chunks: Sequence[QueryChunk]) -> None: ...

    def decode_grid(self, rows: int) -> AttentionGrid: ...

    def every_grid(self) -> AttentionGrid: ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Faces:
    """What the device's operations are called with: the constructors and functions of
    `engine.kernels` by the same names."""

    head_sizes: tuple[int, ...] | None = HEAD_SIZES  # of a head that attention takes; None: any
    lora: Callable[..., DeviceLora] = TritonLora
    attention: Callable[..., DeviceAttention] = TritonAttention
    int4: Callable[..., Int4Gemm] = TritonInt4
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = pointwise_triton.rms_norm
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor] = pointwise_triton.add_rms_norm
    rotate_and_write: Callable[..., Tensor] = pointwise_triton.rotate_and_write
    silu_gate: Callable[[Tensor], Tensor] = pointwise_triton.silu_gate
    sample: Callable[[Tensor, Tensor], Tensor] = sample_triton.sample
