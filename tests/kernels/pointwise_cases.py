"""Rows of every dtype for the pointwise operations, and what they must give."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.pointwise import HeadNorm

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
"""Of the largest value: two roundings in a row, which the interpreter makes towards zero."""


@dataclass(frozen=True)
class RotaryCase:
    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    norm: bool
    padding: int = 0  # rows at the end that are not written

    def run(self, face, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
        """(queries, all keys, all values) of the cache after the call."""
        generator = torch.Generator().manual_seed(self.rows)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        qkv = randn(self.rows, width + 8)[:, :width].to(self.dtype)
        half = torch.outer(torch.arange(self.rows) * 7.0, 0.9 ** torch.arange(self.head_dim // 2))
        cos = torch.cat((half.cos(), half.cos()), -1)
        sin = torch.cat((-half.sin(), half.sin()), -1)
        rows = torch.randperm(64, generator=generator)[: self.rows]
        rows[self.rows - self.padding :] = -1
        kv_width = self.kv_heads * self.head_dim
        block = torch.full((4, 16, kv_width), 7.0, dtype=self.dtype).to(device)
        keys, values = block[::2].reshape(-1, kv_width), block[1::2].reshape(-1, kv_width)
        keys, values = (x.repeat(2, 1) for x in (keys, values))
        norm = HeadNorm(randn(self.heads + self.kv_heads, self.head_dim).to(device), 1e-6)
        arguments = [each.to(device) for each in (qkv, cos, sin, rows)]
        q = face.rotate_and_write(
            *arguments, keys, values, heads=self.heads, norm=norm if self.norm else None
        )
        return q, keys, values


ROTARY_CASES = [
    RotaryCase(3, 9, 3, 64, torch.bfloat16, norm=False),
    RotaryCase(5, 4, 2, 128, torch.bfloat16, norm=True, padding=2),
    RotaryCase(1, 7, 1, 64, torch.float16, norm=True),
    RotaryCase(2, 8, 8, 128, torch.float32, norm=False),
    RotaryCase(0, 4, 2, 64, torch.bfloat16, norm=True),
]
ROW_CASES = list(
    itertools.product([0, 1, 5], [1, 96, 1100], [torch.float32, torch.bfloat16, torch.float16])
)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if expected.numel():
        bound = TOLERANCE[expected.dtype] * float(expected.float().abs().max().clamp_min(1e-3))
        torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=bound)


def assert_rotary_matches(case: RotaryCase, face, device: str = "cpu") -> None:
    for actual, expected in zip(case.run(face, device), case.run(reference, device), strict=True):
        assert_close(actual, expected)


def assert_rows_match(rows: int, width: int, dtype: torch.dtype, face, device="cpu") -> None:
    """Norm, norm with residual and gating over rows of a wider tensor."""
    generator = torch.Generator().manual_seed(rows + width)
    wide = torch.randn(2, rows, 2 * width + 3, generator=generator).to(device, dtype)
    weight = torch.randn(width, generator=generator).to(device, dtype)
    x, update = wide[0, :, :width], wide[1, :, :width]
    assert_close(face.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    gate_up = wide[0, :, : 2 * width]
    assert_close(face.silu_gate(gate_up), reference.silu_gate(gate_up))
    hidden, expected = x.clone(), x.clone()
    normed = face.add_rms_norm(hidden, update, weight, 1e-5)
    assert_close(normed, reference.add_rms_norm(expected, update, weight, 1e-5))
    assert_close(hidden, expected)
