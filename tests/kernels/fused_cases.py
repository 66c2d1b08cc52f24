"""A 4-bit linear of three slices under mixed adapters, fused and separate."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.fused_cuda import Int4LoraLinear
from engine.kernels.int4_cuda import TritonInt4
from engine.kernels.lora_cuda import TritonLora
from engine.kernels.reference import ReferenceLora
from tests.kernels.int4_cases import Int4Case
from tests.kernels.lora_cases import Case

SLICES = (256, 128, 128)


@dataclass(frozen=True)
class FusedCase:
    row_slots: tuple[int, ...]
    ranks: tuple[tuple[int, int, int, int], ...]
    group: int = 128
    symmetric: bool = True
    in_features: int = 256
    seed: int = 0
    capability: int | None = None  # of the card that tiles are chosen for; None: the device's own

    @property
    def adapters(self) -> Case:
        slots = list(self.row_slots)
        return Case(self.in_features, SLICES, list(self.ranks), slots, seed=self.seed)

    @property
    def base(self) -> Int4Case:
        rows, out = len(self.row_slots), sum(SLICES)
        return Int4Case(rows, out, self.in_features, self.group, self.symmetric, seed=self.seed)

    def run(self, fuse: bool | None, device: str = "cpu", *, batch_invariant: bool = False):
        """y of the kernels."""
        case = self.adapters
        arena, layouts, first_bytes = case.arena()
        lora = TritonLora(
            arena.to(device), case.modules, slots=8, max_rows=256, max_rank=256, dtype="bf16",
            batch_invariant=batch_invariant,
        )  # fmt: skip
        case.fill(lora, layouts, first_bytes)
        gemm = TritonInt4(
            torch.device(device), max_out_features=sum(SLICES), batch_invariant=batch_invariant
        )
        if self.capability is not None:
            gemm.capability = self.capability
        linear, weight = Int4LoraLinear(gemm, lora), self.base.packed(device)
        batch = lora.new_batch(256)
        batch.build(self.row_slots)
        linear.new_step(batch, len(self.row_slots), weight)
        return linear.linear(self.base.x(device), weight, case.fused, batch, fuse=fuse)

    def expected(self) -> Tensor:
        case, y = self.adapters, self.base.expected()
        arena, layouts, first_bytes = case.arena()
        reference = ReferenceLora(arena, case.modules, slots=8, dtype="bf16")
        case.fill(reference, layouts, first_bytes)
        batch = reference.new_batch(max(1, len(self.row_slots)))
        batch.build(self.row_slots)
        reference.linear(case.fused, batch, self.base.x(), y)
        return y


MIXED = ((8, 16, 24, 4), (0, 30, 1, 0), (17, 0, 7, 16), (16, 16, 16, 16))
CASES = {
    "one row": FusedCase((2,), MIXED),
    "base rows only": FusedCase((-1,) * 5, MIXED),
    "no rows": FusedCase((), MIXED),
    "every row its own": FusedCase((0, 1, 2, 3, -1), MIXED, group=32),
    "two tiles of rows": FusedCase((0, -1, 3) * 7, MIXED, symmetric=False),
    "a prompt": FusedCase((1,) * 40 + (-1,) * 30 + (0,) * 5, MIXED, group=64),
}
