"""fp8 linears."""

from collections.abc import Iterator

import numpy as np

from benchmarks import roofline
from benchmarks.kernels_parts.case import Case, Target, Trial, difference
from engine.kernels import fp8, reference

CHECKED_ROWS = 4


def cases(target: Target) -> Iterator[Case]:
    _, width, out = target.shape.linears()[0]
    for rows in (*target.sizes.decodes, target.sizes.prompt):
        yield _case(target, rows, out, width)


def _case(target: Target, rows: int, out: int, width: int) -> Case:
    def opened() -> Trial | None:
        bits = np.random.default_rng(0).integers(0, 127, (out, width), dtype=np.uint8)
        scale = np.full((1, 1), 0.01, np.float32)
        weight, x = fp8.pack(bits, scale, target.device), target.randn(rows, width)
        if not fp8.multiplies_fp8(weight):
            return None

        def error() -> float:
            expected = reference.fp8_linear(x[:CHECKED_ROWS], bits, scale, rounds=True)
            return difference(fp8.linear(x, weight)[:CHECKED_ROWS].cpu(), expected)

        return Trial(lambda: fp8.linear(x, weight), error)

    return Case(f"fp8 qkv, {rows} rows", roofline.fp8_linear(rows, out, width), opened)
