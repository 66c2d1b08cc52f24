"""Random bf16 adapters of one layer, in one arena."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.roofline import Work
from benchmarks.step_roofline import Shape
from engine.kernels.lora import Lora
from engine.kernels.metadata import ALIGNMENT, SliceGroup
from engine.types import AdapterLayout, AdapterModule, ModuleSpec

RANKS = (8, 16, 32, 64)
MIXED_RANKS = (1, 3, 8, 17, 33, 64, 128, 256)
ADAPTERS = 64


def layer_modules(shape: Shape) -> list[ModuleSpec]:
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {
        "q_proj": (shape.hidden, q), "k_proj": (shape.hidden, kv), "v_proj": (shape.hidden, kv),
        "o_proj": (q, shape.hidden), "gate_proj": (shape.hidden, shape.inner),
        "up_proj": (shape.hidden, shape.inner), "down_proj": (shape.inner, shape.hidden),
    }  # fmt: skip
    linears = [ModuleSpec(name, name, 0, *size, 1.0) for name, size in sizes.items()]
    edge = ModuleSpec("embed_tokens", "embed_tokens", -1, shape.vocabulary, shape.hidden, 1.0)
    return [*linears, edge]


@dataclass(frozen=True)
class Adapters:
    """`layouts`: of each slot; the blob of slot i begins at byte starts[i] of the arena."""

    modules: list[ModuleSpec]
    layouts: list[AdapterLayout]
    starts: list[int]
    nbytes: int
    _ranks: dict[tuple[int, int], int] = field(default_factory=dict)

    def rank(self, slot: int, module: int) -> int:
        """0 where the adapter does not change it."""
        return self._ranks.get((slot, module), 0)

    def arena(self, device: torch.device) -> Tensor:
        arena = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        arena.view(torch.bfloat16).normal_(std=0.02)
        return arena

    def fill(self, lora: Lora) -> None:
        for slot, (layout, start) in enumerate(zip(self.layouts, self.starts, strict=True)):
            lora.activate(slot, layout, start)


def make(modules: list[ModuleSpec], *, mixed: bool, edge: bool = False) -> Adapters:
    """Adapters of ranks 8 to 64 on every linear; `mixed`: of ranks 1 to 256, each without every
    third linear. `edge`: four, of the embedding alone."""
    ranks = MIXED_RANKS if mixed else RANKS if edge else RANKS * (ADAPTERS // len(RANKS))
    layouts, starts, end, known = [], [], 0, {}
    for slot, rank in enumerate(ranks):
        at, placed = 0, []
        for index, module in enumerate(modules):
            if (module.layer < 0) != edge or (mixed and (index + slot) % 3 == 0):
                continue
            b_offset = _aligned(at + 2 * rank * module.in_features)
            placed.append(AdapterModule(index, rank, 0.5, at, b_offset))
            at = _aligned(b_offset + 2 * rank * module.out_features)
            known[slot, index] = rank
        layouts.append(AdapterLayout(tuple(placed), "bf16", rank, at))
        starts.append(end)
        end += at
    return Adapters(modules, layouts, starts, end, known)


def linear_work(adapters: Adapters, group: SliceGroup, row_slots: list[int]) -> Work:
    """As roofline.lora, of adapters that may leave slices out."""
    total = Work(0)
    for module, out in zip(group.modules, group.out_features, strict=True):
        columns = group.in_features + out
        ranks = {slot: adapters.rank(slot, module) for slot in set(row_slots) if slot >= 0}
        rows = [ranks[slot] for slot in row_slots if slot >= 0 and ranks[slot]]
        total += Work(
            2 * (sum(ranks.values()) * columns + 2 * len(rows) * out), 2 * sum(rows) * columns
        )
    changed = sum(
        any(adapters.rank(slot, module) for module in group.modules)
        for slot in row_slots
        if slot >= 0
    )
    return total + Work(2 * changed * group.in_features)


def embedding_work(adapters: Adapters, group: SliceGroup, row_slots: list[int]) -> Work:
    """A row of A for each token, each distinct adapter's B once, y in and out."""
    (module,), out = group.modules, group.width
    ranks = {slot: adapters.rank(slot, module) for slot in set(row_slots) if slot >= 0}
    rows = [ranks[slot] for slot in row_slots if slot >= 0]
    moved = 2 * (sum(rows) + sum(ranks.values()) * out + 2 * len(rows) * out)
    return Work(moved, 2 * sum(rows) * out)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
