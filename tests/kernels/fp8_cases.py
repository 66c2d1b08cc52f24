"""Random e4m3 weights as a checkpoint has them, and rows to multiply."""

import numpy as np
import torch

from engine.kernels import fp8, reference
from tests.kernels.int4_cases import relative_error

SHAPES = [(0, 32, 64), (1, 48, 64), (5, 256, 128), (3, 30, 64)]  # rows, out, in; the last odd


def error(rows: int, out: int, width: int, dtype: torch.dtype, device: str = "cpu") -> float:
    generator = np.random.default_rng(rows)
    bits = generator.integers(0, 255, (out, width), dtype=np.uint8)
    bits[(bits & 127) == 127] = 0  # NaN
    scale = generator.uniform(0.5, 2, (out if rows % 2 else 1, 1)).astype(np.float32)
    x = torch.from_numpy(generator.normal(size=(rows, width))).to(dtype)
    if rows > 1:
        x[1] = 0
    weight = fp8.pack(bits, scale, device)
    actual = fp8.linear(x.to(device), weight)
    assert actual.dtype == dtype
    expected = reference.fp8_linear(x, bits, scale, rounds=fp8.multiplies_fp8(weight))
    return relative_error(actual, expected.float())
