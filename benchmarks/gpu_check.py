"""Whether the whole engine is right, with an adapter and without: asked by `gpu`.

A step of the served path holds a sequence with an adapter and one of the base model. The first must
answer as an exact engine does whose weights have that adapter merged in, the second as an exact one
of the base model; and replays have the bits of eager steps.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_engine import RandomCheckpoint, open_engine
from engine.cuda.runner import CudaExecutor
from engine.model.config import ModelConfig
from engine.model.quantization import Floats
from engine.model.weights import Weight
from engine.types import (
    AdapterBlob,
    AdapterLayout,
    AdapterModule,
    PlanRow,
    SamplingParams,
    SequenceStart,
    StepPlan,
)

TOLERANCE = 5e-2
SCALE = 0.5
BLOCKS = 20
PROMPT = [(7 * i * i + 3) % 89 for i in range(300)]
Matrices = dict[str, tuple[Floats, Floats]]
"""A [rank, in] and B [out, rank] by the name of their module."""


class MergedWeight(Weight):
    def __init__(self, base: Weight, a: Floats, b: Floats) -> None:
        self.shape, self._base, self._a, self._b = base.shape, base, a, b

    def decode(self, start: int = 0, stop: int | None = None) -> Floats:
        return self._base.decode(start, stop) + SCALE * (self._b[start:stop] @ self._a)

    def take(self, indices: np.ndarray) -> Floats:
        return self._base.take(indices) + SCALE * (self._b[indices] @ self._a)


class MergedCheckpoint(RandomCheckpoint):
    """The random weights with an adapter in them."""

    def __init__(self, config: ModelConfig, matrices: Matrices) -> None:
        super().__init__(config)
        self._matrices = matrices

    def weight(self, name: str) -> Weight:
        base, found = super().weight(name), self._matrices.get(name.removesuffix(".weight"))
        return base if found is None else MergedWeight(base, *found)


def adapter(executor: CudaExecutor, rank: int) -> tuple[AdapterBlob, Matrices]:
    """A random one on every linear of the blocks, as large as what it is added to."""
    at, placed, parts, matrices = 0, [], [], {}
    generator = torch.Generator().manual_seed(1)
    for index, module in enumerate(executor.description.modules):
        if module.layer < 0:
            continue
        a = torch.randn(rank, module.in_features, generator=generator) * module.in_features**-0.5
        b = torch.randn(module.out_features, rank, generator=generator) * rank**-0.5
        a, b = a.bfloat16(), b.bfloat16()
        b_offset = at + 2 * a.numel()
        placed.append(AdapterModule(index, rank, SCALE, at, b_offset))
        at = b_offset + 2 * b.numel()
        parts += [a.flatten(), b.flatten()]
        matrices[module.name.removesuffix(".weight")] = a.float().numpy(), b.float().numpy()
    data = executor.device.pinned(at)
    data.view(torch.bfloat16).copy_(torch.cat(parts))
    return AdapterBlob(AdapterLayout(tuple(placed), "bf16", rank, at), data.numpy()), matrices


def load(executor: CudaExecutor, blob: AdapterBlob) -> None:
    """Into slot 0, at the arena's end."""
    extents = -(-blob.layout.nbytes // executor.description.kv_block_bytes)
    executor.start_copy(0, executor.extent_count - extents, blob)
    while executor.poll_copies(0) != [0]:
        pass


def answers(executor: CudaExecutor, slots: list[int], prompt: list[int]) -> dict[str, Tensor]:
    """The logits [sequences, vocab] of a prompt, and of a decode replayed and eager."""
    params, found = SamplingParams(4, 0.0), {}
    starts = [SequenceStart(seq, prompt, [], params, 0) for seq in range(len(slots))]
    for seq, slot in enumerate(slots):
        blocks = list(range(BLOCKS * seq, BLOCKS * (seq + 1)))
        row = PlanRow(seq, 0, prompt, blocks, slot, True)
        executor.execute(StepPlan(seq, [], [starts[seq]], [], [row]))
        found[f"prompt {seq}"] = executor.logits[0].clone()
    for name, graphs in (("replayed", True), ("eager", False)):
        executor.replay(graphs=graphs)
        rows = [PlanRow(seq, len(prompt), [5], [], slot, True) for seq, slot in enumerate(slots)]
        executor.execute(StepPlan(len(slots), [], [], [], rows))
        for seq in range(len(slots)):
            found[f"{name} {seq}"] = executor.logits[seq].clone()
    return found


def check(
    config: ModelConfig,
    *,
    rank: int = 64,
    prompt: list[int] = PROMPT,
    opened: Callable[..., CudaExecutor] = open_engine,
) -> bool:
    """Prints each comparison; whether all are right. `config`: its first two layers are taken."""
    shape = replace(config, layers=min(config.layers, 2))
    options = {"device_memory_share": 0.25}
    executor = opened(shape, linear_path="auto", **options)
    blob, matrices = adapter(executor, rank)
    load(executor, blob)
    served = answers(executor, [0, -1], prompt)
    del executor
    right = True
    for seq, checkpoint, title in (
        (0, MergedCheckpoint(shape, matrices), f"adapter of rank {rank} against merged fp32"),
        (1, RandomCheckpoint(shape), "base beside an adapter against fp32"),
    ):
        exact = opened(shape, checkpoint=checkpoint, linear_path="fp32", **options)
        due = answers(exact, [-1], prompt)
        del exact
        for step in ("prompt", "replayed"):
            expected = due[f"{step} 0"]
            off = float((served[f"{step} {seq}"] - expected).abs().max() / expected.abs().max())
            right = right and off < TOLERANCE
            print(f"{f'{step}, {title}':56}{off:10.1e}{'' if off < TOLERANCE else '  WRONG'}")
    same = all(torch.equal(served[f"replayed {seq}"], served[f"eager {seq}"]) for seq in (0, 1))
    print(f"{'replayed decodes have the bits of eager ones':56}{same!s:>10}")
    return right and same
