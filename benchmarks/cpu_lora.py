"""What adapters add to a step on this CPU: the native library's pass beside numba's and torch's.

    python -m benchmarks.cpu_lora [--threads 2] [--rounds 9]

All seven linears of every layer of the packaged base model; adapters of random bf16 numbers (ranks
8 x 8, 4 x 16, 2 x 32, 2 x 64), far larger together than the caches; a call for each slice group, as
in a step. The passes take turns; told is each one's least time, and what the adapters weigh.
"""

import argparse
import time
from collections.abc import Iterator

import torch

from benchmarks.arguments import at_least_one
from benchmarks.packaged import packaged_base_model
from engine import huge_pages
from engine.kernels.lora import Lora, open_lora
from engine.kernels.lora_torch import TorchLora
from engine.kernels.metadata import ALIGNMENT, LoraBatch, SliceGroup, layer_groups
from engine.model.config import ModelConfig
from engine.model.description import module_names
from engine.model.loader import module_shape, open_checkpoint
from engine.native.build import load
from engine.types import AdapterLayout, AdapterModule, ModuleSpec

RANKS = (8,) * 8 + (16,) * 4 + (32,) * 2 + (64,) * 2
CASES = {
    "32 rows, 16 adapters": [row % 16 for row in range(32)],
    "1 row, rank 8": [0],
    "1 row, rank 64": [15],
    "32 rows of one adapter, rank 16": [8] * 32,
    "prompt of 256, rank 8": [0] * 256,
    "prompt of 256, rank 16": [8] * 256,
    "512 rows, 4 adapters": [3] * 128 + [9] * 128 + [12] * 128 + [15] * 128,
}
MOST_ROWS = 512


class Bench:
    """One arena with every adapter, and x and y for a step."""

    def __init__(self) -> None:
        config = open_checkpoint(packaged_base_model()).config
        self.modules = tuple(_module(config, name) for name in module_names(config)[1:-1])
        self.layouts = [self._layout(rank) for rank in RANKS]
        self.starts = [0]
        for layout in self.layouts:
            self.starts.append(self.starts[-1] + layout.nbytes)
        self.arena = huge_pages.zeros(self.starts[-1])
        self.arena.view(torch.bfloat16).normal_(0.0, 0.01)
        self.groups = [
            group
            for layer in range(config.layers)
            for of in [layer_groups(self.modules, layer)]
            for group in (of.qkv, of.o, of.gate_up, of.down)
        ]
        self.x = self._matrix(max(group.in_features for group in self.groups)).normal_()
        self.y = self._matrix(max(group.width for group in self.groups))

    @staticmethod
    def _matrix(width: int) -> torch.Tensor:
        return huge_pages.zeros(MOST_ROWS * width * 4).view(torch.float32).view(MOST_ROWS, width)

    def _layout(self, rank: int) -> AdapterLayout:
        placed, at = [], 0
        for index, module in enumerate(self.modules):
            b_offset = _aligned(at + 2 * rank * module.in_features)
            placed.append(AdapterModule(index, rank, 1.0, at, b_offset))
            at = _aligned(b_offset + 2 * rank * module.out_features)
        return AdapterLayout(tuple(placed), "bf16", rank, at)

    def filled(self, lora: Lora) -> Lora:
        for slot, layout in enumerate(self.layouts):
            lora.activate(slot, layout, self.starts[slot])
        return lora

    def passes(self) -> Iterator[tuple[str, Lora]]:
        library = load()
        sizes = {"slots": len(RANKS), "max_rows": MOST_ROWS, "max_rank": max(RANKS)}
        if library is not None:
            yield (
                "native",
                open_lora(
                    self.arena, self.modules, dtype="bf16", compiled=library.adapters, **sizes
                ),
            )
        yield "numba", open_lora(self.arena, self.modules, dtype="bf16", **sizes)
        yield "torch", TorchLora(self.arena, self.modules, slots=len(RANKS), dtype="bf16")

    def step_ms(self, lora: Lora, batch: LoraBatch, rows: int) -> float:
        began_s = time.perf_counter()
        for group in self.groups:
            self._call(lora, group, batch, rows)
        return 1000.0 * (time.perf_counter() - began_s)

    def _call(self, lora: Lora, group: SliceGroup, batch: LoraBatch, rows: int) -> None:
        lora.linear(group, batch, self.x[:rows, : group.in_features], self.y[:rows, : group.width])


def _module(config: ModelConfig, name: str) -> ModuleSpec:
    _, _, layer, _, target = name.split(".")
    outputs, inputs = module_shape(config, target)
    return ModuleSpec(name, target, int(layer), inputs, outputs, 1.0)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--threads", type=at_least_one, default=2)
    options.add_argument("--rounds", type=at_least_one, default=9)
    wanted = options.parse_args()
    torch.set_num_threads(wanted.threads)
    bench = Bench()
    passes = {name: bench.filled(lora) for name, lora in bench.passes()}
    print(f"{'ms a step':32} {'MB':>6}" + "".join(f"{name:>10}" for name in passes))
    for title, slots in CASES.items():
        least = dict.fromkeys(passes, float("inf"))
        batches = {name: lora.new_batch(MOST_ROWS) for name, lora in passes.items()}
        for batch in batches.values():
            batch.build(slots)
        for _ in range(wanted.rounds):
            for name, lora in passes.items():
                took = bench.step_ms(lora, batches[name], len(slots))
                least[name] = min(least[name], took)
        mb = sum(bench.layouts[slot].nbytes for slot in set(slots)) / 1e6
        print(f"{title:32} {mb:6.0f}" + "".join(f"{ms:10.2f}" for ms in least.values()), flush=True)


if __name__ == "__main__":
    main()
