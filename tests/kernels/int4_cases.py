"""Random 4-bit weights as a checkpoint has them, and rows to multiply."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.int4 import Int4Gemm, PackedInt4, pack
from engine.model.quantization import GROUP, Int4Codes


@dataclass(frozen=True)
class Int4Case:
    rows: int
    out_features: int = 136
    in_features: int = 384
    group: int = 128
    symmetric: bool = True
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0

    def codes(self) -> Int4Codes:
        generator = np.random.default_rng(self.seed)
        shape = (self.out_features, self.in_features // self.group)
        scale = generator.uniform(0.01, 0.03, shape).astype(np.float32)
        zero = generator.normal(size=shape).astype(np.float32) * 0.1 * (not self.symmetric)
        scale, zero = (np.repeat(part, self.group // GROUP, axis=1) for part in (scale, zero))
        q = generator.integers(0, 16, (self.out_features, self.in_features), dtype=np.uint8)
        return Int4Codes(q, scale, zero)

    def packed(self, device: str = "cpu") -> PackedInt4:
        return pack(self.codes(), self.dtype, device)

    def x(self, device: str = "cpu") -> Tensor:
        """Rows of a wider tensor whose other columns are NaN."""
        generator = torch.Generator().manual_seed(self.seed)
        wide = torch.full((self.rows, self.in_features + 8), float("nan"))
        wide[:, : self.in_features] = torch.randn(self.rows, self.in_features, generator=generator)
        return wide.to(device, self.dtype)[:, : self.in_features]

    def expected(self) -> Tensor:
        return reference.int4_linear(self.x(), self.codes(), self.dtype)


CASES = {
    "no rows": Int4Case(0),
    "one row": Int4Case(1),
    "fp16": Int4Case(5, dtype=torch.float16),
    "groups of 64": Int4Case(3, group=64),
    "groups of 32": Int4Case(16, group=32),
    "zeros": Int4Case(7, symmetric=False),
    "zeros, groups of 32, fp16": Int4Case(2, 64, 96, 32, symmetric=False, dtype=torch.float16),
    "an input of half a tile": Int4Case(18, 40, 192, 64),
    "a wide output": Int4Case(33, 300, 256),
    "a prompt": Int4Case(130, 130, 256, symmetric=False),
}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, of the largest value."""
    assert actual.shape == expected.shape
    if not expected.numel():
        return 0.0
    return float((actual.float().cpu() - expected).abs().max() / expected.abs().max())


def error(case: Int4Case, gemm: Int4Gemm, device: str = "cpu") -> float:
    actual = gemm.linear(case.x(device), case.packed(device))
    assert actual.dtype == case.dtype
    return relative_error(actual, case.expected())
