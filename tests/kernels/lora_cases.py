"""Small models and random adapters for the LoRA kernels, in one arena at their true ranks."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.kernels.lora import Lora
from engine.kernels.metadata import ALIGNMENT, ITEM_BYTES, AdapterDtype, SliceGroup
from engine.types import AdapterLayout, AdapterModule, ModuleSpec

VOCABULARY = 40


@dataclass(frozen=True)
class Case:
    """Adapters of given ranks, and the rows that use them."""

    in_features: int
    out_features: tuple[int, int, int]
    ranks: list[tuple[int, int, int, int]]  # an adapter: of three linears and the embedding
    row_slots: list[int]
    dtype: AdapterDtype = "bf16"
    seed: int = 0

    @property
    def modules(self) -> tuple[ModuleSpec, ...]:
        linears = zip(("q_proj", "k_proj", "v_proj"), self.out_features, strict=True)
        return (
            *(ModuleSpec(t, t, 0, self.in_features, width, 1.0) for t, width in linears),
            ModuleSpec("embed", "embed_tokens", -1, VOCABULARY, self.in_features, 1.0),
        )

    @property
    def fused(self) -> SliceGroup:
        return SliceGroup.of(self.modules, (0, 1, 2))

    @property
    def single(self) -> SliceGroup:
        return SliceGroup.of(self.modules, (1,))

    @property
    def embedding(self) -> SliceGroup:
        return SliceGroup.of(self.modules, (3,))

    def arena(self) -> tuple[Tensor, list[AdapterLayout], list[int]]:
        """The arena, every adapter's layout, and the byte where each begins.

        What lies between and after the matrices is NaN: reading it shows.
        """
        layouts = [self._layout(ranks) for ranks in self.ranks]
        first_bytes = np.cumsum([ALIGNMENT] + [layout.nbytes for layout in layouts])
        arena = torch.full((int(first_bytes[-1]) + ALIGNMENT,), 0xFF, dtype=torch.uint8)
        generator = torch.Generator().manual_seed(self.seed)
        elements = arena.view(torch.bfloat16 if self.dtype == "bf16" else torch.float32)
        item = ITEM_BYTES[self.dtype]
        for layout, first_byte in zip(layouts, first_bytes, strict=False):
            for placed in layout.modules:
                spec = self.modules[placed.module]
                for offset, features in (
                    (placed.a_offset, spec.in_features),
                    (placed.b_offset, spec.out_features),
                ):
                    start, count = (int(first_byte) + offset) // item, placed.rank * features
                    elements[start : start + count] = torch.randn(count, generator=generator)
        return arena, layouts, first_bytes[:-1].tolist()

    def fill(self, lora: Lora, layouts: list[AdapterLayout], first_bytes: list[int]) -> None:
        for slot, (layout, first_byte) in enumerate(zip(layouts, first_bytes, strict=True)):
            lora.activate(slot, layout, first_byte)

    def inputs(self, group: SliceGroup) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, in], tokens [T], y [T, width] with values that an update of 0 would change."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        rows = len(self.row_slots)
        x = torch.randn(rows, self.in_features, generator=generator)
        tokens = torch.randint(VOCABULARY, (rows,), generator=generator)
        y = torch.randn(rows, group.width, generator=generator)
        y[:, 0] = -0.0
        return x, tokens, y

    def _layout(self, ranks: tuple[int, ...]) -> AdapterLayout:
        item, at, placed = ITEM_BYTES[self.dtype], 0, []
        for index, (spec, rank) in enumerate(zip(self.modules, ranks, strict=True)):
            if rank:
                a_offset, b_offset = at, _aligned(at + rank * spec.in_features * item)
                at = _aligned(b_offset + rank * spec.out_features * item) + ALIGNMENT
                placed.append(AdapterModule(index, rank, 0.5 + 0.25 * index, a_offset, b_offset))
        return AdapterLayout(tuple(placed), self.dtype, max(ranks), at)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def assert_matches(case: Case, lora: Lora, reference: Lora, tolerance: float = 2e-5) -> None:
    """Both operations of `lora` equal the reference's; rows of the base model keep every bit."""
    rows = len(case.row_slots)
    batch, plain = lora.new_batch(max(rows, 1)), reference.new_batch(max(rows, 1))
    batch.build(case.row_slots)
    plain.build(case.row_slots)
    base = torch.tensor([slot < 0 for slot in case.row_slots], dtype=torch.bool)
    for group in (case.fused, case.single, case.embedding):
        x, tokens, before = case.inputs(group)
        actual, expected = before.clone(), before.clone()
        if group == case.embedding:
            lora.embedding(group, batch, tokens, actual)
            reference.embedding(group, plain, tokens, expected)
        else:
            lora.linear(group, batch, x, actual)
            reference.linear(group, plain, x, expected)
        bound = tolerance * float(expected.abs().max().clamp_min(1)) if rows else 0.0
        torch.testing.assert_close(actual, expected, rtol=0, atol=bound)
        assert torch.equal(actual[base].view(torch.int32), before[base].view(torch.int32))
