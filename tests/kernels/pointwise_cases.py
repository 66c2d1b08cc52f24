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
    seed: int = 0

    def run(self, face, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
        """(queries, all keys, all values) of the cache after the call.

        What lies beside and after the arguments is NaN: reading it shows.
        """
        generator = torch.Generator().manual_seed(self.rows + self.seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        qkv = among_nan(randn(self.rows, width).to(self.dtype))
        half = torch.outer(torch.arange(self.rows) * 7.0, 0.9 ** torch.arange(self.head_dim // 2))
        cos = before_nan(torch.cat((half.cos(), half.cos()), -1).to(device))
        sin = before_nan(torch.cat((-half.sin(), half.sin()), -1).to(device))
        rows = torch.randperm(63, generator=generator)[: self.rows]
        rows[self.rows - self.padding :] = -1
        kv_width = self.kv_heads * self.head_dim
        block = torch.full((4, 16, kv_width), 7.0, dtype=self.dtype).to(device)
        keys, values = block[::2].reshape(-1, kv_width), block[1::2].reshape(-1, kv_width)
        # row 0 lies before the cache: a write to row -1 shows
        keys, values = (x.repeat(2, 1) for x in (keys, values))
        norm = HeadNorm(before_nan(randn(self.heads + self.kv_heads, self.head_dim)), 1e-6)
        q = face.rotate_and_write(
            qkv, cos, sin, rows.to(device), keys[1:], values[1:],
            heads=self.heads, norm=norm if self.norm else None,
        )  # fmt: skip
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


def among_nan(x: Tensor) -> Tensor:
    """The same rows in a tensor with more columns and rows, all NaN."""
    wide = x.new_full((x.shape[0] + 1, x.shape[1] + 8), torch.nan)
    wide[:-1, :-8] = x
    return wide[:-1, :-8]


def before_nan(x: Tensor) -> Tensor:
    """The same numbers, contiguous, with NaN behind the last."""
    longer = x.new_full((x.numel() + 256,), torch.nan)
    longer[: x.numel()] = x.flatten()
    return longer[: x.numel()].view(x.shape)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if expected.numel():
        bound = TOLERANCE[expected.dtype] * float(expected.float().abs().max().clamp_min(1e-3))
        torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=bound)


def assert_rotary_matches(case: RotaryCase, face, device: str = "cpu") -> None:
    for actual, expected in zip(case.run(face, device), case.run(reference, device), strict=True):
        assert_close(actual, expected)


def assert_rows_match(
    rows: int, width: int, dtype: torch.dtype, face, device: str = "cpu", seed: int = 0
) -> None:
    """Norm, norm with residual and gating over rows of a wider tensor, NaN around them."""
    generator = torch.Generator().manual_seed(rows + width + seed)
    wide = torch.randn(2, rows, 2 * width, generator=generator).to(device, dtype)
    weight = before_nan(torch.randn(width, generator=generator).to(device, dtype))
    x, update = among_nan(wide[0, :, :width]), among_nan(wide[1, :, :width])
    assert_close(face.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    gate_up = among_nan(wide[0])
    assert_close(face.silu_gate(gate_up), reference.silu_gate(gate_up))
    hidden, expected = x.clone(), x.clone()
    normed = face.add_rms_norm(hidden, update, weight, 1e-5)
    assert_close(normed, reference.add_rms_norm(expected, update, weight, 1e-5))
    assert_close(hidden, expected)
