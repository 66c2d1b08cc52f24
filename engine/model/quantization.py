"""Decodes the weight formats of GGUF: whole matrices to fp32, 4-bit ones to their codes as well.

A quantized row is a run of blocks of 32 weights (ggml-common.h in the ggml repository):

    Q8_0  fp16 d, 32 x int8              w = d q
    Q4_0  fp16 d, 16 bytes of nibbles    w = d (q - 8)
    Q4_1  fp16 d, fp16 m, 16 bytes       w = d q + m

In these 4-bit blocks, byte j holds weight j in its low nibble and weight j + 16 in its high one.

The K formats are super-blocks of 256 weights:

    Q4_K  fp16 d, fp16 m, 12 bytes of eight 6-bit (s, t), 128 bytes   w = d s q - m t, of 32
    Q5_K  the same with 32 bytes of fifth bits before the nibbles
    Q6_K  128 low nibbles, 64 bytes of high pairs, 16 int8 s, fp16 d  w = d s (q - 32), of 16

In Q4_K and Q5_K, 32 bytes hold two groups: one in the low nibbles, the next in the high ones.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.gguf import TENSOR_TYPES
from engine.model.config import CheckpointRefused

GROUP = 32
"""Weights that share a scale."""
INT4_TYPES = ("Q4_0", "Q4_1", "Q4_K")
PLAIN_TYPES = ("F32", "F16", "BF16")
DECODED_TYPES = (*PLAIN_TYPES, "Q8_0", *INT4_TYPES, "Q5_K", "Q6_K")

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Int4Codes:
    """A matrix [out, in] as w = scale * (q - 8) + zero, one scale and zero a group of 32."""

    q: npt.NDArray[np.uint8]  # [out, in], 0..15
    scale: Floats  # [out, in / 32]
    zero: Floats  # [out, in / 32]

    def rows(self, start: int, stop: int | None) -> "Int4Codes":
        """Those of the rows start..stop, without a copy."""
        return Int4Codes(self.q[start:stop], self.scale[start:stop], self.zero[start:stop])


@dataclass(frozen=True, slots=True)
class Int8Codes:
    """A matrix [out, in] as w = scale * q, one scale a group of 32."""

    q: npt.NDArray[np.int8]  # [out, in]
    scale: Floats  # [out, in / 32]


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
        eight = int8_codes(rows)
        values = eight.q.reshape(count, -1, GROUP) * eight.scale[..., None]
        return values.reshape(count, columns)
    if type_name in INT4_TYPES:
        codes = int4_codes(type_name, rows, columns)
        grouped = codes.q.reshape(count, -1, GROUP).astype(np.float32) - 8.0
        grouped *= codes.scale[..., None]
        grouped += codes.zero[..., None]
        return grouped.reshape(count, columns)
    if type_name == "Q5_K":
        blocks = rows.reshape(count, -1, 176)
        scale, low = _k_scales(blocks[..., :16])
        fifth = (blocks[..., 16:48, None] >> np.arange(8, dtype=np.uint8)) & 1
        q = _k_nibbles(blocks[..., 48:]) + 16 * fifth.swapaxes(-1, -2)
        return (q * scale[..., None] - low[..., None]).reshape(count, columns)
    if type_name == "Q6_K":
        return _decode_q6_k(rows.reshape(count, -1, 210)).reshape(count, columns)
    raise CheckpointRefused(
        f"weights of type {type_name} are not supported: {', '.join(DECODED_TYPES)}"
    )


def _decode_q6_k(blocks: npt.NDArray[np.uint8]) -> Floats:
    """[rows, n, 210] -> fp32 [rows, n, 256]. Each half of 128 weights is four runs of 32."""
    lead = blocks.shape[:2]
    nibbles = blocks[..., :128].reshape(*lead, 2, 1, 64)
    low = np.concatenate((nibbles & 0x0F, nibbles >> 4), axis=-2).reshape(*lead, 2, 4, 32)
    pairs = blocks[..., 128:192].reshape(*lead, 2, 1, 32)
    high = (pairs >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    q = (low | (high << 4)).reshape(*lead, 16, 16).astype(np.float32) - 32.0
    scale = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    d = _view(blocks[..., 208:], np.float16).astype(np.float32)
    return (q * (d * scale)[..., None]).reshape(*lead, 256)


def _k_scales(head: npt.NDArray[np.uint8]) -> tuple[Floats, Floats]:
    """d s and m t of Q4_K's and Q5_K's eight groups: [rows, n, 16] -> two of [rows, n, 8]."""
    d, m = np.moveaxis(_view(head[..., :4], np.float16).astype(np.float32)[..., None], -2, 0)
    first, second, high = head[..., 4:8], head[..., 8:12], head[..., 12:16]
    s = np.concatenate((first & 63, (high & 0x0F) | ((first >> 6) << 4)), axis=-1)
    t = np.concatenate((second & 63, (high >> 4) | ((second >> 6) << 4)), axis=-1)
    return d * s, m * t


def _k_nibbles(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """[rows, n, 128] -> [rows, n, 8, 32]."""
    pairs = packed.reshape(*packed.shape[:2], 4, 1, 32)
    return np.concatenate((pairs & 0x0F, pairs >> 4), axis=-2).reshape(*packed.shape[:2], 8, 32)


def decode_fp8(bits: npt.NDArray[np.uint8]) -> Floats:
    """e4m3fn (https://arxiv.org/abs/2209.05433): four exponent and three mantissa bits."""
    return _FP8_VALUES[bits]


def _fp8_values() -> Floats:
    bits = np.arange(256)
    exponent, mantissa = (bits >> 3) & 15, (bits & 7) / 8
    size = np.where(exponent > 0, (1 + mantissa) * 2.0 ** (exponent - 7), mantissa * 2.0**-6)
    size[(bits & 127) == 127] = np.nan
    return np.where(bits < 128, size, -size).astype(np.float32)


_FP8_VALUES = _fp8_values()


def int4_codes(type_name: str, rows: npt.NDArray[np.uint8], columns: int) -> Int4Codes:
    """The 4-bit codes of `rows`: uint8 [rows, row_bytes], of one of INT4_TYPES."""
    if type_name == "Q4_K":
        super_blocks = rows.reshape(rows.shape[0], -1, 144)
        scales, low = _k_scales(super_blocks[..., :16])
        shape = (rows.shape[0], columns // GROUP)
        scale, zero = scales.reshape(shape), (8.0 * scales - low).reshape(shape)
        return Int4Codes(_k_nibbles(super_blocks[..., 16:]).reshape(-1, columns), scale, zero)
    header = 4 if type_name == "Q4_1" else 2
    blocks = rows.reshape(rows.shape[0], -1, header + GROUP // 2)
    nibbles = blocks[..., header:]
    q = np.concatenate((nibbles & 0x0F, nibbles >> 4), axis=-1).reshape(-1, columns)
    head = _view(blocks[..., :header], np.float16).astype(np.float32)
    scale = np.ascontiguousarray(head[..., 0])
    zero = head[..., 1] + 8.0 * scale if type_name == "Q4_1" else np.zeros_like(scale)
    return Int4Codes(q, scale, zero)


def int8_codes(rows: npt.NDArray[np.uint8]) -> Int8Codes:
    """The codes of Q8_0's `rows`: uint8 [rows, row_bytes]."""
    blocks = rows.reshape(rows.shape[0], -1, 2 + GROUP)
    scale = _view(blocks[..., :2], np.float16).astype(np.float32)[..., 0]
    q = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
    return Int8Codes(q.reshape(rows.shape[0], -1), scale)


def _view(raw: npt.NDArray[np.uint8], dtype: type[np.generic]) -> npt.NDArray[Any]:
    """The little-endian numbers of the last axis."""
    return np.ascontiguousarray(raw).view(np.dtype(dtype).newbyteorder("<"))
