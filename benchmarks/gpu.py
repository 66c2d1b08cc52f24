"""Checks and times the GPU kernels of this repository on the CUDA device that is here.

    python -m benchmarks.gpu [all|kernels|engine]

First every kernel must equal its plain reference; only then is it timed, beside the time that its
bytes or its operations alone would take (`roofline`) at the copy bandwidth and the bf16 rate
measured in the same run. At the end, the fused 4-bit linear beside the separate one: the rows that
`engine/kernels/fuse.py` may take. Then the whole engine (`gpu_engine`): right or not, graphs beside
eager steps, decodes and prompts against their floors, adapters against the base, loads beside
steps. Needs torch, triton and numpy, no model and no network; meant to stay under 8 minutes.
"""

import argparse
import gc
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks import gpu_engine, gpu_kernels, roofline
from engine.kernels.fuse import fusable
from engine.kernels.fused_cuda import Int4LoraLinear
from engine.kernels.int4 import pack
from engine.kernels.int4_cuda import TritonInt4
from engine.kernels.lora_cuda import TritonLora
from engine.kernels.metadata import SliceGroup, layer_groups
from engine.kernels.reference import ReferenceLora
from engine.types import AdapterLayout, AdapterModule, ModuleSpec

HIDDEN, KEY_VALUE, INNER = 4096, 1024, 14336  # one block of an 8B Llama
MAX_ROWS = 1024
RANKS = (8, 16, 32, 64)
ADAPTERS = 64


@dataclass(frozen=True)
class Workload:
    name: str
    row_slots: list[int]


WORKLOADS = [
    Workload("1 row", [0]),
    Workload("32 rows, 1 adapter", [0] * 32),
    Workload("32 rows, 16 adapters", [row % 16 for row in range(32)]),
    Workload("64 rows, 64 adapters", list(range(64))),
    Workload("256 rows, 64 adapters", [row % 64 for row in range(256)]),
    Workload("64 rows, half of the base", [row % 8 if row % 2 else -1 for row in range(64)]),
    Workload("prefill 512 rows, 1 adapter", [3] * 512),
    Workload("prefill 1024 rows, 4 adapters", [row // 256 for row in range(1024)]),
]


def block() -> list[ModuleSpec]:
    shapes = {
        "q_proj": (HIDDEN, HIDDEN),
        "k_proj": (HIDDEN, KEY_VALUE),
        "v_proj": (HIDDEN, KEY_VALUE),
        "o_proj": (HIDDEN, HIDDEN),
        "gate_proj": (HIDDEN, INNER),
        "up_proj": (HIDDEN, INNER),
        "down_proj": (INNER, HIDDEN),
    }
    return [ModuleSpec(target, target, 0, *shape, 1.0) for target, shape in shapes.items()]


def fill_arena(modules: list[ModuleSpec]) -> tuple[torch.Tensor, list[AdapterLayout], list[int]]:
    """64 random bf16 adapters of ranks 8 to 64 in one arena."""
    layouts, first_bytes, end = [], [], 0
    for slot in range(ADAPTERS):
        rank, at, placed = RANKS[slot % len(RANKS)], 0, []
        for index, module in enumerate(modules):
            b_offset = at + 2 * rank * module.in_features
            placed.append(AdapterModule(index, rank, 0.5, at, b_offset))
            at = b_offset + 2 * rank * module.out_features
        layouts.append(AdapterLayout(tuple(placed), "bf16", rank, at))
        first_bytes.append(end)
        end += at
    arena = torch.empty(end, dtype=torch.uint8, device="cuda")
    arena.view(torch.bfloat16).normal_(std=0.02)
    return arena, layouts, first_bytes


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a large copy on this device."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (milliseconds(lambda: target.copy_(source)) / 1e3)


def milliseconds(call: Callable[[], object], repeats: int = 30) -> float:
    """Median time of a call captured as a CUDA graph, with the L2 cache flushed before each."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(repeats):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def matmul_rate() -> float:
    """Operations a second of a large bf16 product on this device."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * 8192**3 / (milliseconds(lambda: a @ b) / 1e3)


def lora_work(group: SliceGroup, row_slots: list[int]) -> roofline.Work:
    rank = {slot: RANKS[slot % len(RANKS)] for slot in row_slots if slot >= 0}
    row_ranks = [rank[slot] for slot in row_slots if slot >= 0]
    slices = len(group.modules)
    return roofline.lora(row_ranks, rank.values(), slices, group.in_features, group.width)


def error(
    lora: TritonLora, reference: ReferenceLora, group: SliceGroup, row_slots: list[int]
) -> float:
    """Largest difference over the reference's largest value; infinite if a base row changed."""
    x, y = inputs(group, len(row_slots))
    before, expected = y.clone(), torch.zeros(y.shape, device="cuda")
    batch, plain = lora.new_batch(MAX_ROWS), reference.new_batch(MAX_ROWS)
    batch.build(row_slots)
    plain.build(row_slots)
    lora.linear(group, batch, x, y)
    reference.linear(group, plain, x, expected)
    base = torch.tensor([slot < 0 for slot in row_slots], device="cuda")
    if not torch.equal(y[base], before[base]):
        return float("inf")
    added = y.float() - before.float()
    return float((added - expected).abs().max() / expected.abs().max())


def inputs(group: SliceGroup, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal x, and y of zeros: what a call adds is then its whole result."""
    x = torch.randn(rows, group.in_features, device="cuda", dtype=torch.bfloat16)
    return x, torch.zeros(rows, group.width, device="cuda", dtype=torch.bfloat16)


def timed(name: str, off: float, call: Callable[[], object], floor: float) -> bool:
    """Prints one line; false when the kernel is wrong."""
    if not off <= 2e-2:
        print(f"{name:42}{off:10.1e}  WRONG, not timed")
        return False
    took = milliseconds(call)
    print(f"{name:42}{off:10.1e}{took:9.4f}{floor:10.4f}{floor / took:8.0%}")
    return True


def fuse_or_separate(lora: TritonLora, modules: list[ModuleSpec]) -> None:
    """Times both ways of a 4-bit linear with adapters, by adapters a batch."""
    print(f"\n{'4-bit linear with adapters':42}{'separate':>10}{'fused':>10}   ms")
    gemm = TritonInt4(lora.arena.device, max_out_features=2 * INNER)
    linear, groups = Int4LoraLinear(gemm, lora), layer_groups(modules, 0)
    for group in (groups.qkv, groups.o, groups.gate_up, groups.down):
        codes = gpu_kernels.random_codes(group.width, group.in_features)
        weight = pack(codes, torch.bfloat16, "cuda")
        for rows, adapters in ((16, 1), (16, 16), (64, 1), (64, 16), (64, 64), (512, 4)):
            row_slots = sorted(row % adapters for row in range(rows))
            batch = lora.new_batch(MAX_ROWS)
            batch.build(row_slots)
            linear.new_step(batch, rows, weight)
            if not fusable(group, gemm.tile(rows, weight, lora.planes(batch)).columns):
                continue
            x, _ = inputs(group, rows)
            took = [
                milliseconds(
                    lambda fuse=fuse, x=x, w=weight, g=group, b=batch: linear.linear(
                        x, w, g, b, fuse=fuse
                    )
                )
                for fuse in (False, True)
            ]
            name = f"({group.width}, {group.in_features}), {rows} rows, {adapters} adapters"
            print(f"{name:42}{took[0]:10.4f}{took[1]:10.4f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", choices=("all", "kernels", "engine"), default="all")
    part = parser.parse_args().part
    if not torch.cuda.is_available():
        print("no CUDA device here; nothing was checked", file=sys.stderr)
        return 1
    bandwidth, rate = copy_bandwidth(), matmul_rate()
    device = torch.cuda.get_device_name()
    print(f"{device}: copy {bandwidth / 1e12:.2f} TB/s, bf16 {rate / 1e12:.0f} TFLOP/s")
    right = True
    if part != "engine":
        right = kernels(bandwidth, rate)
        gc.collect()
        torch.cuda.empty_cache()
    if part != "kernels":
        right = gpu_engine.run(bandwidth, rate) and right
    return 0 if right else 1


def kernels(bandwidth: float, rate: float) -> bool:
    """Checks and times every kernel; whether all are right."""
    modules = block()
    arena, layouts, first_bytes = fill_arena(modules)
    lora = TritonLora(
        arena, modules, slots=ADAPTERS, max_rows=MAX_ROWS, max_rank=max(RANKS), dtype="bf16"
    )
    reference = ReferenceLora(arena, modules, slots=ADAPTERS, dtype="bf16")
    for slot, (layout, first_byte) in enumerate(zip(layouts, first_bytes, strict=True)):
        lora.activate(slot, layout, first_byte)
        reference.activate(slot, layout, first_byte)
    groups = layer_groups(modules, 0)
    print(f"{'':42}{'error':>10}{'ms':>9}{'floor ms':>10}{'of it':>8}")
    right = [
        timed(case.name, case.error(), case.call, case.work.floor_ms(bandwidth, rate))
        for case in gpu_kernels.cases()
    ]
    for workload in WORKLOADS:
        for name in ("qkv", "o", "gate_up", "down"):
            group: SliceGroup = getattr(groups, name)
            batch = lora.new_batch(MAX_ROWS)
            batch.build(workload.row_slots)
            x, y = inputs(group, len(workload.row_slots))
            floor = lora_work(group, workload.row_slots).floor_ms(bandwidth, rate)
            off = error(lora, reference, group, workload.row_slots)

            def call(g: SliceGroup = group, b=batch, x=x, y=y) -> None:
                lora.linear(g, b, x, y)

            right.append(timed(f"lora {name}, {workload.name}", off, call, floor))
    fuse_or_separate(lora, modules)
    return all(right)


if __name__ == "__main__":
    raise SystemExit(main())
