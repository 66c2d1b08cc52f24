"""Rounds to GGUF's K formats: super-blocks of 256 weights. Decoded by the package gguf itself."""

import numpy as np

K_TYPES = ("Q4_K", "Q5_K", "Q6_K")


def quantize_k(weight: np.ndarray, kind: str) -> tuple[bytes, np.ndarray]:
    """`weight` fp32 [out, in], in a multiple of 256: the bytes and the weight they stand for."""
    blocks = weight.reshape(-1, 256)
    raw = _q6_k(blocks) if kind == "Q6_K" else _q45_k(blocks, bits=int(kind[1]))
    rows = raw.reshape(weight.shape[0], -1)
    import gguf  # a GPU machine, which needs none of these formats, may lack it

    values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
    return rows.tobytes(), values.reshape(weight.shape).astype(np.float32)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    groups = blocks.reshape(-1, 16, 16)
    span = np.abs(groups).max(-1) / 31
    d = (span.max(-1, keepdims=True) / 127).astype("<f2")
    s = np.round(span / d.astype(np.float32)).clip(1, 127)
    step = (s * d.astype(np.float32))[..., None]
    q = (np.round(groups / step).clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (q[:, :, :2] & 15) | ((q[:, :, 2:] & 15) << 4)  # [n, 2, 2, 32]
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = ((q >> 4) << shifts).sum(2, dtype=np.uint8)  # [n, 2, 32]
    count = blocks.shape[0]
    parts = (low.reshape(count, -1), high.reshape(count, -1), s.astype(np.int8).view(np.uint8))
    return np.concatenate((*parts, d.view(np.uint8)), axis=1)


def _q45_k(blocks: np.ndarray, *, bits: int) -> np.ndarray:
    groups = blocks.reshape(-1, 8, 32)
    low = np.maximum(-groups.min(-1), 0)
    span = (groups.max(-1) + low) / (2**bits - 1)
    d = (span.max(-1, keepdims=True) / 63).astype("<f2")
    m = (low.max(-1, keepdims=True) / 63).astype("<f2")
    s = np.round(span / d.astype(np.float32)).clip(1, 63).astype(np.uint8)
    t = np.round(low / m.astype(np.float32)).clip(0, 63).astype(np.uint8)
    step, base = s * d.astype(np.float32), t * m.astype(np.float32)
    q = np.round((groups + base[..., None]) / step[..., None]).clip(0, 2**bits - 1)
    codes = q.astype(np.uint8)
    nibbles = codes & 15
    packed = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)  # [n, 4, 32]
    first = s[:, :4] | ((s[:, 4:] >> 4) << 6)
    second = t[:, :4] | ((t[:, 4:] >> 4) << 6)
    third = (s[:, 4:] & 15) | ((t[:, 4:] & 15) << 4)
    head = [d.view(np.uint8), m.view(np.uint8), first, second, third]
    if bits == 5:
        shifts = np.arange(8, dtype=np.uint8)[:, None]
        head.append(((codes >> 4) << shifts).sum(1, dtype=np.uint8))
    return np.concatenate((*head, packed.reshape(blocks.shape[0], -1)), axis=1)
