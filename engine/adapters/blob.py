"""An adapter as one contiguous buffer, ready to be copied to the device in one transfer.

For each module A [rank, in] and B [out, rank] at their true rank, bf16 (uint16 bit patterns) or
fp32, every matrix at an offset that is a multiple of 64 bytes. For embed_tokens A is turned to
[vocab, rank], so that a token's row is contiguous, and B stays [hidden, rank].
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np

from engine.adapters.plan import AdapterPlan
from engine.adapters.safetensors_header import TensorInfo
from engine.adapters.tensor_data import TensorData, to_bf16_bits, to_float32
from engine.errors import AdapterRefused
from engine.types import AdapterBlob, AdapterLayout, AdapterModule

ALIGNMENT_BYTES = 64
BlobDtype = Literal["bf16", "fp32"]
Allocate = Callable[[int], np.ndarray]


def layout_adapter(plan: AdapterPlan, dtype: BlobDtype) -> AdapterLayout:
    """Where everything will lie; needs no file, so budgets can be reserved before reading."""
    item = 2 if dtype == "bf16" else 4
    modules: list[AdapterModule] = []
    at = 0
    for pair in plan.pairs:
        b_offset = _aligned(at + _elements(pair.a) * item)
        modules.append(AdapterModule(pair.module, pair.rank, pair.scale, at, b_offset))
        at = _aligned(b_offset + _elements(pair.b) * item)
    return AdapterLayout(tuple(modules), dtype, max((m.rank for m in modules), default=0), at)


def aligned_buffer(nbytes: int) -> np.ndarray:
    """uint8 [nbytes] of zeros whose address is a multiple of 64."""
    spare = np.zeros(nbytes + ALIGNMENT_BYTES, np.uint8)
    start = -spare.ctypes.data % ALIGNMENT_BYTES
    return spare[start : start + nbytes]


def build_blob(
    weights_path: Path, plan: AdapterPlan, dtype: BlobDtype, *, allocate: Allocate = aligned_buffer
) -> AdapterBlob:
    """Reads the planned tensors into one aligned buffer; at most a few MiB beside it.

    `allocate`: makes the buffer, uint8 [nbytes] of zeros at a multiple of 64.

    Raises AdapterRefused for a number that is not finite (in `dtype`), AdapterCorrupt for a file
    that ends early.
    """
    plan.require()
    layout = layout_adapter(plan, dtype)
    buffer = allocate(layout.nbytes)
    with TensorData(weights_path) as data:
        for pair, place in zip(plan.pairs, layout.modules, strict=True):
            turned = pair.embedding
            _fill(data, pair.a, _view(buffer, place.a_offset, pair.a, dtype, turned=turned))
            _fill(data, pair.b, _view(buffer, place.b_offset, pair.b, dtype, turned=False))
    return AdapterBlob(layout, buffer)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _elements(tensor: TensorInfo) -> int:
    height, width = tensor.shape
    return height * width


def _view(
    buffer: np.ndarray, offset: int, tensor: TensorInfo, dtype: BlobDtype, *, turned: bool
) -> np.ndarray:
    """The part of `buffer` that holds `tensor`, indexed as in the file: [rows, columns]."""
    height, width = tensor.shape
    kind = np.dtype(np.uint16 if dtype == "bf16" else np.float32)
    flat = buffer[offset : offset + height * width * kind.itemsize].view(kind)
    return flat.reshape(width, height).T if turned else flat.reshape(height, width)


def _fill(data: TensorData, tensor: TensorInfo, target: np.ndarray) -> None:
    exponent = np.uint16(0x7F80) if target.dtype == np.uint16 else np.uint32(0x7F800000)
    for start, raw in data.rows(tensor):
        if target.dtype == np.float32:
            block = to_float32(raw, tensor.dtype)
            bits = block.view(np.uint32)
        elif tensor.dtype == "BF16":
            block = bits = raw
        else:
            values = to_float32(raw, tensor.dtype)
            if not np.isfinite(values).all():
                raise _not_finite(tensor)
            block = bits = to_bf16_bits(values)
        if ((bits & exponent) == exponent).any():
            raise _not_finite(tensor)
        target[start : start + len(raw)] = block


def _not_finite(tensor: TensorInfo) -> AdapterRefused:
    return AdapterRefused(f"{tensor.name[:200]} holds NaN or infinity", code="non_finite")
