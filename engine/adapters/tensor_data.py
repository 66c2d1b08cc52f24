"""The numbers of a safetensors file, read in bounded blocks with pread and converted by NumPy.

No mapping: a file that shrinks under a reader then gives a short read, not a signal that kills the
engine.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import numpy as np

from engine.adapters.safetensors_header import ITEM_BYTES, TensorInfo, open_regular
from engine.errors import AdapterCorrupt

CHUNK_BYTES = 4 * 1024 * 1024
"""Upper bound of one block in its stored dtype."""


class TensorData:
    """An open weights file. Tensors are 2-D here: [rows, columns]."""

    def __init__(self, path: Path) -> None:
        self._descriptor = open_regular(path)

    def __enter__(self) -> "TensorData":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)

    def raw(self, tensor: TensorInfo, start: int, count: int) -> np.ndarray:
        """`count` elements from element `start`: uint16 for F16 and BF16, float32 for F32."""
        item = ITEM_BYTES[tensor.dtype]
        data = os.pread(self._descriptor, count * item, tensor.start + start * item)
        if len(data) != count * item:
            raise AdapterCorrupt(f"the weights file ends inside {tensor.name[:100]}")
        return np.frombuffer(data, "<f4" if tensor.dtype == "F32" else "<u2")

    def rows(self, tensor: TensorInfo) -> Iterator[tuple[int, np.ndarray]]:
        """(first row, [rows, columns] raw) blocks that cover the tensor."""
        height, width = tensor.shape
        step = max(1, CHUNK_BYTES // max(1, width * ITEM_BYTES[tensor.dtype]))
        for start in range(0, height, step):
            count = min(step, height - start)
            yield start, self.raw(tensor, start * width, count * width).reshape(count, width)

    def float_rows(self, tensor: TensorInfo) -> Iterator[np.ndarray]:
        """Blocks of rows in float32."""
        for _, block in self.rows(tensor):
            yield to_float32(block, tensor.dtype)

    def float_columns(self, tensor: TensorInfo) -> Iterator[np.ndarray]:
        """Blocks [all rows, some columns] in float32, for tensors that are wide and low."""
        height, width = tensor.shape
        step = max(1, CHUNK_BYTES // max(1, height * ITEM_BYTES[tensor.dtype]))
        if step >= width:
            yield to_float32(self.raw(tensor, 0, height * width), tensor.dtype).reshape(
                height, width
            )
            return
        for start in range(0, width, step):
            count = min(step, width - start)
            rows = [self.raw(tensor, row * width + start, count) for row in range(height)]
            yield to_float32(np.stack(rows), tensor.dtype)


def to_float32(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Exact: every F16 and BF16 value, subnormals too, is a float32."""
    if dtype == "F32":
        return raw
    if dtype == "F16":
        return raw.view(np.float16).astype(np.float32)
    return (raw.astype(np.uint32) << 16).view(np.float32)


def to_bf16_bits(values: np.ndarray) -> np.ndarray:
    """float32 -> uint16 bit patterns of bf16, rounded to nearest, ties to even. Finite input."""
    bits = values.view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
