"""4-bit linears with adapters, in one kernel and in two: the rows that `fuse.py` may take."""

from collections.abc import Iterator

import torch

from benchmarks import roofline
from benchmarks.kernels_parts import adapters as held
from benchmarks.kernels_parts.adapters import Adapters
from benchmarks.kernels_parts.case import Case, Target, Trial, difference
from benchmarks.kernels_parts.int4 import NAMES, packed, random_codes
from benchmarks.kernels_parts.lora import open_triton, reference_update
from benchmarks.roofline import Work
from engine.kernels import reference
from engine.kernels.fuse import fusable
from engine.kernels.metadata import SliceGroup, layer_groups

BATCHES = ((16, 1), (16, 16), (64, 1), (64, 16), (64, 64), (512, 4))
"""(rows, adapters)"""


def cases(target: Target) -> Iterator[Case]:
    if not target.triton:
        return
    modules = held.layer_modules(target.shape)
    groups, adapters = layer_groups(modules, 0), held.make(modules, mixed=False)
    for name in NAMES:
        group: SliceGroup = getattr(groups, name)
        for rows, count in BATCHES:
            slots = sorted(row % count for row in range(rows))
            for fuse in (False, True):
                way = "fused" if fuse else "separate"
                title = f"int4 + lora {name}, {rows} rows of {count}, {way}"
                yield _case(target, title, adapters, group, slots, fuse=fuse)


def _case(
    target: Target, name: str, adapters: Adapters, group: SliceGroup, slots: list[int], *,
    fuse: bool,
) -> Case:  # fmt: skip
    rows = len(slots)

    def opened() -> Trial | None:
        from engine.kernels.fused_cuda import Int4LoraLinear
        from engine.kernels.int4_cuda import TritonInt4
        from engine.kernels.lora_cuda import TritonLora

        codes = random_codes(group.width, group.in_features, 128, False)
        weight = packed(group.width, group.in_features, 128, False, torch.bfloat16, target.device)
        arena = adapters.arena(target.device)
        lora = open_triton(target, adapters, arena, rows)
        assert isinstance(lora, TritonLora)
        adapters.fill(lora)
        batch = lora.new_batch(rows)
        batch.build(slots)
        gemm = TritonInt4(target.device, max_out_features=group.width)
        if fuse and not fusable(group, gemm.tile(rows, weight, lora.planes(batch)).columns):
            return None
        linear, x = Int4LoraLinear(gemm, lora), target.randn(rows, group.in_features)
        linear.new_step(batch, rows, weight)

        def call() -> torch.Tensor:
            return linear.linear(x, weight, group, batch, fuse=fuse)

        def error() -> float:
            expected = reference.int4_linear(x, codes, torch.bfloat16)
            expected += reference_update(adapters, arena, group, slots, "linear", x)
            return difference(call(), expected)

        return Trial(call, error)

    base = roofline.int4_linear(rows, group.width, group.in_features, 128, zeros=False)
    added = held.linear_work(adapters, group, slots)
    read_again = 2 * rows * 2 * group.width if fuse else 0  # y, and written
    return Case(name, base + added + Work(-read_again), opened)
