"""What a whole step must at least move and multiply, by part, and how long that takes on a device.

python -m benchmarks.step_roofline --device h200|cpu [--bandwidth BYTES_A_SECOND --flops A_SECOND]

Norms, rotations and gates are left out: their rows stay in a cache. What is not given for the CPU
is measured: a read of 256 MB and an fp32 product, with torch's number of threads.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks import roofline
from benchmarks.arguments import add_speeds
from benchmarks.roofline import Work

REFERENCE_RANKS = (*[8] * 8, *[16] * 4, *[32] * 2, *[64] * 2)
DECODES = (1, 4, 32)
PROMPT = 256
PROMPT_RANK = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """A model; `linear_bits` and `head_bits` are of a weight, scales included."""

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    linear_bits: float
    head_bits: float
    kv_bytes: int = 2

    def linears(self) -> tuple[tuple[int, int, int], ...]:
        """(slices that share the input, width of the input, outputs together) of a layer."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (
            (3, self.hidden, q + 2 * kv), (1, q, self.hidden),
            (2, self.hidden, 2 * self.inner), (1, self.inner, self.hidden),
        )  # fmt: skip


LLAMA_8B = Shape("8B, int4", 32, 4096, 14336, 32, 8, 128, 128256, 4.125, 16)
SMOLLM2 = Shape("SmolLM2-135M, Q4_1", 30, 576, 1536, 9, 3, 64, 49152, 5, 8.5)
DEVICES = {"h200": (LLAMA_8B, 1024), "cpu": (SMOLLM2, 160)}
H200 = (4.3e12, 989e12)


def step(
    shape: Shape,
    chunks: Sequence[tuple[int, int]],
    row_ranks: Sequence[int],
    ranks: Sequence[int],
    logits: int,
) -> dict[str, Work]:
    """chunks: (position of the first query, queries); row_ranks: the rank of each adapter row;
    ranks: of each distinct adapter; logits: rows that are sampled. Adapters are in 16 bits."""
    rows = sum(count for _, count in chunks)
    linears, lora = Work(0), Work(0)
    for slices, width, out in shape.linears():
        weights = shape.layers * width * out
        moved = round(weights * shape.linear_bits / 8) + 2 * shape.layers * rows * (width + out)
        linears += Work(moved, 2 * rows * weights)
        lora += times(roofline.lora(row_ranks, ranks, slices, width, out), shape.layers)
    weights = shape.vocabulary * shape.hidden
    moved = round(weights * shape.head_bits / 8) + 4 * logits * shape.vocabulary
    attention = roofline.attention(
        chunks, shape.heads, shape.kv_heads, shape.head_dim, kv_bytes=shape.kv_bytes
    )
    return {
        "linears": linears,
        "head": Work(moved, 2 * logits * weights),
        "attention": times(attention, shape.layers),
        "LoRA": lora,
    }


def times(work: Work, count: int) -> Work:
    return Work(count * work.bytes, count * work.operations)


def table(shape: Shape, context: int, bandwidth: float, flops: float) -> list[str]:
    """Markdown: the floor of each part in ms; a step's is the sum of its parts'."""
    lines = [
        "| step | adapters | linears | head | attention | LoRA | step, ms | MB | Gflop |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for rows in (*DECODES, 0):
        name = f"decode of {rows} at {context}" if rows else f"prompt of {PROMPT}"
        chunks = [(context - 1, 1)] * rows or [(0, PROMPT)]
        used = [REFERENCE_RANKS[row % len(REFERENCE_RANKS)] for row in range(rows)]
        distinct = used[: len(REFERENCE_RANKS)] or [PROMPT_RANK]
        for adapters in ([], distinct):
            row_ranks = (used or [PROMPT_RANK] * PROMPT) if adapters else []
            parts = step(shape, chunks, row_ranks, adapters, rows or 1)
            floors = [part.floor_ms(bandwidth, flops) for part in parts.values()]
            total = sum(parts.values(), Work(0))
            cells = " | ".join(f"{floor:.3f}" for floor in (*floors, sum(floors)))
            lines.append(
                f"| {name} | {len(adapters)} | {cells} | {total.bytes / 1e6:.0f} "
                f"| {total.operations / 1e9:.2f} |"
            )
    return lines


def least_seconds(call: Callable[[], object], repeats: int = 7) -> float:
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return min(found)


def measured_bandwidth() -> float:
    """Bytes a second that a sum over 256 MB reads."""
    data = torch.ones(64 << 20)
    return 4 * data.numel() / least_seconds(data.sum)


def measured_flops() -> float:
    """Operations a second of an fp32 product."""
    a = torch.ones(1024, 1024)
    return 2 * 1024**3 / least_seconds(lambda: a @ a)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=DEVICES, required=True)
    add_speeds(parser)
    options = parser.parse_args()
    shape, context = DEVICES[options.device]
    known = H200 if options.device == "h200" else None
    bandwidth = options.bandwidth or (known[0] if known else measured_bandwidth())
    flops = options.flops or (known[1] if known else measured_flops())
    print(f"{shape.name}: {bandwidth / 1e9:.0f} GB/s, {flops / 1e9:.0f} Gflop/s; ms\n")
    print("\n".join(table(shape, context, bandwidth, flops)))


if __name__ == "__main__":
    main()
