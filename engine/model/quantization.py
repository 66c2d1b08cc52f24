"""Decodes the weight formats of GGUF: whole matrices to fp32, 4-bit ones to their codes as well.

A quantized row is a run of blocks of 32 weights (ggml-common.h in the ggml repository):

    Q8_0  fp16 d, 32 x int8              w = d q
    Q4_0  fp16 d, 16 bytes of nibbles    w = d (q - 8)
    Q4_1  fp16 d, fp16 m, 16 bytes       w = d q + m

In the 4-bit blocks, byte j holds weight j in its low nibble and weight j + 16 in its high one.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.gguf import TENSOR_TYPES
from engine.model.config import CheckpointRefused

GROUP = 32
"""Weights that share a scale."""
INT4_TYPES = ("Q4_0", "Q4_1")
DECODED_TYPES = ("F32", "F16", "BF16", "Q8_0", *INT4_TYPES)

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Int4Codes:
    """A matrix [out, in] as w = scale * (q - 8) + zero, one scale and zero a group of 32."""

    q: npt.NDArray[np.uint8]  # [out, in], 0..15
    scale: Floats  # [out, in / 32]
    zero: Floats  # [out, in / 32]


def row_bytes(type_name: str, columns: int) -> int:
    """Bytes of one row of `columns` weights."""
    for name, block, block_bytes in TENSOR_TYPES.values():
        if name == type_name:
            return columns // block * block_bytes
    raise CheckpointRefused(f"weights of type {type_name} are not supported")


def decode(type_name: str, rows: npt.NDArray[np.uint8], columns: int) -> Floats:
    """fp32 [rows, columns] of `rows`: uint8 [rows, row_bytes]."""
    count = rows.shape[0]
    if type_name == "F32":
        return _view(rows, np.float32).reshape(count, columns).astype(np.float32)
    if type_name == "F16":
        return _view(rows, np.float16).reshape(count, columns).astype(np.float32)
    if type_name == "BF16":
        bits = _view(rows, np.uint16).reshape(count, columns).astype(np.uint32) << 16
        return bits.view(np.float32)
    if type_name == "Q8_0":
        blocks = rows.reshape(count, -1, 34)
        scale = _view(blocks[..., :2], np.float16).astype(np.float32)
        values = np.ascontiguousarray(blocks[..., 2:]).view(np.int8) * scale
        return values.reshape(count, columns)
    if type_name in INT4_TYPES:
        codes = int4_codes(type_name, rows, columns)
        grouped = codes.q.reshape(count, -1, GROUP).astype(np.float32) - 8.0
        grouped *= codes.scale[..., None]
        grouped += codes.zero[..., None]
        return grouped.reshape(count, columns)
    raise CheckpointRefused(
        f"weights of type {type_name} are not supported: {', '.join(DECODED_TYPES)}"
    )


def int4_codes(type_name: str, rows: npt.NDArray[np.uint8], columns: int) -> Int4Codes:
    """The 4-bit codes of `rows`: uint8 [rows, row_bytes], of type Q4_0 or Q4_1."""
    header = 4 if type_name == "Q4_1" else 2
    blocks = rows.reshape(rows.shape[0], -1, header + GROUP // 2)
    nibbles = blocks[..., header:]
    q = np.concatenate((nibbles & 0x0F, nibbles >> 4), axis=-1).reshape(-1, columns)
    head = _view(blocks[..., :header], np.float16).astype(np.float32)
    scale = np.ascontiguousarray(head[..., 0])
    zero = head[..., 1] + 8.0 * scale if type_name == "Q4_1" else np.zeros_like(scale)
    return Int4Codes(q, scale, zero)


def _view(raw: npt.NDArray[np.uint8], dtype: type[np.generic]) -> npt.NDArray[Any]:
    """The little-endian numbers of the last axis."""
    return np.ascontiguousarray(raw).view(np.dtype(dtype).newbyteorder("<"))
