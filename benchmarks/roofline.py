"""What each kernel must at least move and multiply, and how long that takes on a device.

Bytes: every weight, key, value and adapter once, every row in and out once, in 16 bits unless said
otherwise. Operations are those of matrix products (2 a multiply-add); what surrounds them is bound
by its bytes. Imports nothing, so that it is right on any machine.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    bytes: int
    operations: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.bytes + other.bytes, self.operations + other.operations)

    def floor_ms(self, bytes_a_second: float, operations_a_second: float) -> float:
        """The longer of moving and multiplying."""
        return 1e3 * max(self.bytes / bytes_a_second, self.operations / operations_a_second)


def norm(rows: int, width: int, *, residual: bool) -> Work:
    """x in and y out; with a residual also the update in and the sum out."""
    return Work(2 * width * (rows * (4 if residual else 2) + 1))


def rotate_and_write(rows: int, heads: int, kv_heads: int, head_dim: int) -> Work:
    """q, k and v in; q, and k and v of the cache, out; half of cos and sin, fp32."""
    return Work(rows * head_dim * (2 * 2 * (heads + 2 * kv_heads) + 4))


def silu_gate(rows: int, inner: int) -> Work:
    return Work(2 * 3 * rows * inner)


def attention(
    chunks: Iterable[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None = None,
    kv_bytes: int = 2,
) -> Work:
    """chunks: (position of the first query, queries). Each sequence's keys and values once."""
    total = Work(0)
    for start, count in chunks:
        end = start + count
        first = 0 if window is None else max(0, start + 1 - window)
        seen = sum(
            position + 1 if window is None else min(position + 1, window)
            for position in range(start, end)
        )
        moved = 2 * head_dim * (kv_bytes * kv_heads * (end - first) + 2 * heads * count)
        total += Work(moved, 4 * heads * head_dim * seen)
    return total


def int4_linear(rows: int, out: int, width: int, group: int, *, zeros: bool) -> Work:
    """Half a byte a weight, a scale (and zero) for each group."""
    scales = out * width // group * 2 * (2 if zeros else 1)
    return Work(out * width // 2 + scales + 2 * rows * (width + out), 2 * rows * out * width)


def fp8_linear(rows: int, out: int, width: int) -> Work:
    return Work(out * width + 4 * out + 2 * rows * (width + out), 2 * rows * out * width)


def lora(row_ranks: Iterable[int], ranks: Iterable[int], slices: int, width: int, out: int) -> Work:
    """row_ranks: the rank of each adapter row; ranks: of each distinct adapter, read once. y is
    read and written. `slices` share the input of `width` columns and write `out` together."""
    row_ranks = list(row_ranks)
    weights = sum(ranks) * (slices * width + out)
    moved = 2 * (weights + len(row_ranks) * (width + 2 * out))
    return Work(moved, 2 * sum(row_ranks) * (slices * width + out))


def sample(rows: int, vocabulary: int) -> Work:
    """fp32 logits, once."""
    return Work(4 * rows * vocabulary)
