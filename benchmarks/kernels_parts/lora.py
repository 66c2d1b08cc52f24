"""Multi-LoRA of the linears and of the embedding, under mixed batches."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.kernels_parts import adapters as held
from benchmarks.kernels_parts.adapters import Adapters
from benchmarks.kernels_parts.case import Case, Target, Trial, difference
from engine.kernels.lora import Lora, open_lora
from engine.kernels.lora_torch import TorchLora
from engine.kernels.metadata import SliceGroup, layer_groups
from engine.kernels.reference import ReferenceLora
from engine.native.build import load

NAMES = ("qkv", "o", "gate_up", "down")
Make = Callable[[Target, Adapters, Tensor, int], Lora | None]


def workloads(prompt: int) -> dict[str, list[int]]:
    """The adapter slot of each row."""
    return {
        "1 row": [0],
        "32 rows, 1 adapter": [0] * 32,
        "32 rows, 16 adapters": [row % 16 for row in range(32)],
        "64 rows, 64 adapters": list(range(64)),
        "256 rows, 64 adapters": [row % 64 for row in range(256)],
        "64 rows, half of the base": [row % 8 if row % 2 else -1 for row in range(64)],
        f"prompt of {prompt}, 1 adapter": [3] * prompt,
        f"prompts of {2 * prompt}, 4 adapters": [row % 4 for row in range(2 * prompt)],
    }


def cases(target: Target) -> Iterator[Case]:
    modules = held.layer_modules(target.shape)
    groups = layer_groups(modules, 0)
    common, mixed = held.make(modules, mixed=False), held.make(modules, mixed=True)
    wide = [row % 9 - 1 for row in range(64)]  # each of the mixed adapters, and the base
    for face, make in _faces(target).items():
        for name in NAMES:
            group: SliceGroup = getattr(groups, name)
            for workload, slots in workloads(target.sizes.prompt).items():
                yield _linear(target, make, f"{face} {name}, {workload}", common, group, slots)
            title = f"{face} {name}, 64 rows, ranks 1 to 256, parts absent"
            yield _linear(target, make, title, mixed, group, wide)
        edge = held.make(modules, mixed=False, edge=True)
        group = SliceGroup.of(modules, [len(modules) - 1])
        for rows in (32, target.sizes.prompt):
            slots = [row % 5 - 1 for row in range(rows)]
            yield _embedding(target, make, f"{face} embedding, {rows} rows", edge, group, slots)


def _faces(target: Target) -> dict[str, Make]:
    if target.triton:
        return {"lora": open_triton}
    return {"lora, native": _native, "lora, numba": _numba, "lora, torch": _torch}


def open_triton(target: Target, adapters: Adapters, arena: Tensor, rows: int) -> Lora:
    from engine.kernels.lora_cuda import TritonLora

    most = max(layout.max_rank for layout in adapters.layouts)
    return TritonLora(
        arena, adapters.modules, slots=len(adapters.layouts), max_rows=rows, max_rank=most,
        dtype="bf16",
    )  # fmt: skip


def _native(target: Target, adapters: Adapters, arena: Tensor, rows: int) -> Lora | None:
    library = load()
    return None if library is None else _open(adapters, arena, rows, library.adapters)


def _numba(target: Target, adapters: Adapters, arena: Tensor, rows: int) -> Lora | None:
    lora = _open(adapters, arena, rows, None)
    return None if isinstance(lora, TorchLora) else lora


def _open(adapters: Adapters, arena: Tensor, rows: int, compiled: int | None) -> Lora:
    most = max(layout.max_rank for layout in adapters.layouts)
    return open_lora(
        arena, adapters.modules, slots=len(adapters.layouts), max_rows=rows, max_rank=most,
        dtype="bf16", compiled=compiled,
    )  # fmt: skip


def _torch(target: Target, adapters: Adapters, arena: Tensor, rows: int) -> Lora:
    return TorchLora(arena, adapters.modules, slots=len(adapters.layouts), dtype="bf16")


def _linear(
    target: Target, make: Make, name: str, adapters: Adapters, group: SliceGroup, slots: list[int]
) -> Case:
    work = held.linear_work(adapters, group, slots)

    def opened() -> Trial | None:
        x = target.randn(len(slots), group.in_features)
        return _trial(target, make, adapters, group, slots, "linear", x)

    return Case(name, work, opened)


def _embedding(
    target: Target, make: Make, name: str, adapters: Adapters, group: SliceGroup, slots: list[int]
) -> Case:
    work = held.embedding_work(adapters, group, slots)

    def opened() -> Trial | None:
        tokens = torch.randint(target.shape.vocabulary, (len(slots),), device=target.device)
        return _trial(target, make, adapters, group, slots, "embedding", tokens)

    return Case(name, work, opened)


def _trial(
    target: Target, make: Make, adapters: Adapters, group: SliceGroup, slots: list[int],
    operation: str, given: Tensor,
) -> Trial | None:  # fmt: skip
    arena = adapters.arena(target.device)
    lora = make(target, adapters, arena, len(slots))
    if lora is None:
        return None
    adapters.fill(lora)
    batch = lora.new_batch(len(slots))
    batch.build(slots)
    y = torch.zeros(len(slots), group.width, device=target.device, dtype=target.dtype)

    def add(to: Tensor) -> Tensor:
        getattr(lora, operation)(group, batch, given, to)
        return to

    def error() -> float:
        """Infinite where a row of the base model changed."""
        actual = add(torch.zeros_like(y))
        expected = reference_update(adapters, arena, group, slots, operation, given)
        if actual[torch.tensor(slots, device=actual.device) < 0].any():
            return float("inf")
        return difference(actual, expected)

    return Trial(lambda: add(y), error)


def reference_update(
    adapters: Adapters, arena: Tensor, group: SliceGroup, slots: list[int], operation: str,
    given: Tensor,
) -> Tensor:  # fmt: skip
    """What the adapters add, in fp32."""
    reference = ReferenceLora(arena, adapters.modules, slots=len(adapters.layouts), dtype="bf16")
    adapters.fill(reference)
    batch = reference.new_batch(len(slots))
    batch.build(slots)
    expected = torch.zeros(len(slots), group.width, device=given.device)
    getattr(reference, operation)(group, batch, given, expected)
    return expected
