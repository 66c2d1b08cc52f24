"""The whole engine at the shapes of an 8B Llama with random 4-bit weights, timed.

Started by `python -m benchmarks.gpu`, after `gpu_check`. Every step goes through
CudaExecutor, as in production.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks import roofline
from benchmarks.kernels_parts.int4 import random_codes
from benchmarks.roofline import Work
from engine.config import EngineConfig
from engine.cuda import linear
from engine.cuda.runner import CudaExecutor
from engine.kernels.int4 import PackedInt4
from engine.model.config import ModelConfig, RopeScaling
from engine.model.description import Identity, module_names
from engine.model.form_cache import FormCache
from engine.model.loader import Checkpoint
from engine.model.quantization import Floats, Int4Codes
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

LLAMA_8B = ModelConfig(
    "llama", 128256, 4096, 14336, 32, 32, 8, 128, 1e-5, 5e5, RopeScaling(), 8192, False, (0,)
)
RANKS = (8, 16, 32, 64)
DECODES = (1, 32, 64, 128)
CONTEXT = 1024
ADAPTERS = (1, 16, 100)
ADAPTER_ROWS = 128
PREFILLS = (512, 2048)
REPEATS = 20


class RandomWeight(Weight):
    """A matrix of random 4-bit codes, or of plain numbers where it is a vector or an edge."""

    def __init__(self, shape: tuple[int, ...], codes: Int4Codes | None, block: Floats) -> None:
        self.shape = shape
        self._codes = codes
        self._block = block  # [4096, in] or [in], used over and over

    def decode(self, start: int = 0, stop: int | None = None) -> Floats:
        if len(self.shape) == 1:
            return self._block
        end = min(self.shape[0] if stop is None else stop, self.shape[0])
        if self._codes is None:
            return self.take(np.arange(start, end))
        part = slice(start, end)
        q = self._codes.q[part].astype(np.float32) - 8.0
        return q * np.repeat(self._codes.scale[part], 32, axis=1)

    def take(self, indices: npt.NDArray[np.int64]) -> Floats:
        return self._block[indices % len(self._block)]

    @property
    def has_int4(self) -> bool:
        return self._codes is not None

    def int4(self, start: int = 0, stop: int | None = None) -> Int4Codes | None:
        return None if self._codes is None else self._codes.rows(start, stop)


class RandomCheckpoint(Checkpoint):
    """The same codes in every layer: what a product costs does not depend on them."""

    name = "random"

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._codes: dict[tuple[int, ...], Int4Codes] = {}
        generator = np.random.default_rng(0)
        self._block = generator.standard_normal((4096, config.hidden_size), np.float32) * 0.02

    def weight(self, name: str) -> Weight:
        config = self.config
        hidden, inner = config.hidden_size, config.intermediate_size
        part = name.split(".")[-2]
        if part.endswith("norm"):
            return RandomWeight((hidden,), None, np.ones(hidden, np.float32))
        if part in ("embed_tokens", "lm_head"):
            return RandomWeight((config.vocab_size, hidden), None, self._block)
        shape = {
            "q_proj": (config.q_width, hidden), "k_proj": (config.kv_width, hidden),
            "v_proj": (config.kv_width, hidden), "o_proj": (hidden, config.q_width),
            "gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner),
        }[part]  # fmt: skip
        if shape not in self._codes:
            codes = random_codes(*shape)
            small = replace(codes, scale=codes.scale * (4 / shape[1] ** 0.5))
            self._codes[shape] = small
        return RandomWeight(shape, self._codes[shape], self._block)

    def release(self) -> None:
        """Nothing is mapped."""

    def files(self) -> list[Path]:
        return []

    def tokenizer_digest(self) -> str:
        return "none"


def packed_once() -> Callable[..., PackedInt4]:
    """`kept_int4`, which is slow on the host, once a shape; each layer gets memory of its own."""
    known: dict[tuple[int, ...], PackedInt4] = {}
    pack = linear.kept_int4

    def remembered(forms: FormCache, name: str, weights: Sequence[Weight]) -> PackedInt4:
        shape = (sum(weight.shape[0] for weight in weights), weights[0].columns)
        if shape not in known:
            known[shape] = pack(forms, name, weights)
        return known[shape].moved(torch.Tensor.clone)

    return remembered


def open_engine(
    config: ModelConfig, *, checkpoint: Checkpoint | None = None, device: Any = None,
    faces: Any = None, **options: Any,
) -> CudaExecutor:  # fmt: skip
    """An engine over random weights; on the CUDA device that is here unless another is given."""
    base = (
        checkpoint or RandomCheckpoint(config),
        Identity("0" * 64, dict.fromkeys(module_names(config), 1.0), {}),
    )
    settings: dict[str, Any] = {
        "base_model": Path("random"), "data_dir": Path(tempfile.gettempdir()), "max_rank": 64,
        "form_cache_bytes": 0,
        "max_running": max(DECODES), "max_batch_tokens": max(PREFILLS), "max_slots": 128,
    }  # fmt: skip
    return CudaExecutor(
        EngineConfig(**{**settings, **options}), base=base, device=device, faces=faces
    )


@dataclass
class Batch:
    """Sequences that decode, each with blocks of its own."""

    executor: CudaExecutor
    slots: list[int]
    context: int
    step: int = 0

    @property
    def blocks(self) -> int:
        """Of each sequence."""
        return -(-(self.context + 4 * REPEATS + 1) // 16)

    def start(self) -> None:
        """Their prompts are taken as computed: what the cache holds costs the same."""
        blocks = self.blocks
        params = SamplingParams(max_tokens=1 << 20, temperature=0.0)
        starts = [SequenceStart(seq, [1], [], params, 0) for seq in range(len(self.slots))]
        rows = [
            PlanRow(seq, self.context, [1], list(range(seq * blocks, (seq + 1) * blocks)), slot,
                    True)
            for seq, slot in enumerate(self.slots)
        ]  # fmt: skip
        self.executor.execute(StepPlan(0, [], starts, [], rows))

    def decode(self) -> None:
        self.step += 1
        rows = [
            PlanRow(seq, self.context + self.step, [1], [], slot, True)
            for seq, slot in enumerate(self.slots)
        ]
        self.executor.execute(StepPlan(self.step, [], [], [], rows))

    def close(self) -> None:
        self.executor.execute(StepPlan(0, list(range(len(self.slots))), [], [], []))


def milliseconds(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median wall time of a call that waits for the device, after two to warm up."""
    times = []
    for repeat in range(repeats + 2):
        begin = time.perf_counter()
        call()
        if repeat >= 2:
            times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def decode_ms(executor: CudaExecutor, slots: list[int], context: int = CONTEXT) -> float:
    batch = Batch(executor, slots, context)
    batch.start()
    took = milliseconds(batch.decode)
    batch.close()
    return took


def step_work(chunks: list[tuple[int, int]], ranks: list[int], logits: int) -> Work:
    """chunks: (position of the first query, queries); ranks: of each row's own adapter, 0: none.

    Rows of one rank share an adapter here, so each distinct one is read once.
    """
    c = LLAMA_8B
    rows = sum(count for _, count in chunks)
    layer = roofline.attention(chunks, c.heads, c.kv_heads, c.head_dim)
    layer += roofline.rotate_and_write(rows, c.heads, c.kv_heads, c.head_dim)
    layer += roofline.norm(rows, c.hidden_size, residual=True)
    layer += roofline.norm(rows, c.hidden_size, residual=True)
    layer += roofline.silu_gate(rows, c.intermediate_size)
    groups = (
        (3, c.hidden_size, c.q_width + 2 * c.kv_width), (1, c.q_width, c.hidden_size),
        (2, c.hidden_size, 2 * c.intermediate_size), (1, c.intermediate_size, c.hidden_size),
    )  # fmt: skip
    used = [rank for rank in ranks if rank]
    for slices, width, out in groups:
        layer += roofline.int4_linear(rows, out, width, 128, zeros=False)
        if used:
            layer += roofline.lora(used, used[:0], slices, width, out)
    total = Work(2 * c.vocab_size * c.hidden_size, 2 * logits * c.vocab_size * c.hidden_size)
    total += Work(4 * logits * c.vocab_size)
    for _ in range(c.layers):
        total += layer
    return total


def adapter_work(ranks: list[int]) -> Work:
    """Of distinct adapters of these ranks: their weights once, in all layers."""
    c = LLAMA_8B
    one = (
        3 * c.hidden_size + c.q_width + 2 * c.kv_width + c.q_width + c.hidden_size
        + 2 * c.hidden_size + 2 * c.intermediate_size + c.intermediate_size + c.hidden_size
    )  # fmt: skip
    return Work(2 * c.layers * one * sum(ranks))


def blob_of(executor: CudaExecutor, rank: int) -> AdapterBlob:
    """A random adapter of one rank on every linear of the blocks, in locked memory."""
    at, placed = 0, []
    for index, module in enumerate(executor.description.modules):
        if module.layer < 0:
            continue
        b_offset = at + 2 * rank * module.in_features
        placed.append(AdapterModule(index, rank, 0.5, at, b_offset))
        at = b_offset + 2 * rank * module.out_features
    data = executor.device.pinned(at)
    data.view(torch.bfloat16).copy_(
        torch.randn(1 << 16).repeat(-(-at // (1 << 17)))[: at // 2] * 0.02
    )
    return AdapterBlob(AdapterLayout(tuple(placed), "bf16", rank, at), data.numpy())


def load_adapters(executor: CudaExecutor, blobs: dict[int, AdapterBlob], count: int) -> float:
    """Fills slots 0.. from the arena's top down; bytes a second of all copies together."""
    extent, end, total = executor.description.kv_block_bytes, executor.extent_count, 0
    begin = time.perf_counter()
    for slot in range(count):
        blob = blobs[RANKS[slot % len(RANKS)]]
        end -= -(-blob.layout.nbytes // extent)
        executor.start_copy(slot, end, blob)
        total += blob.layout.nbytes
    ready = 0
    while ready < count:
        ready += len(executor.poll_copies(0))
    return total / (time.perf_counter() - begin)


def time_all(bandwidth: float, rate: float) -> None:
    """Prints the whole engine's figures beside their floors."""
    executor = open_engine(LLAMA_8B)
    print("\n".join(executor.budget.table()))
    print(f"\n{'8B, int4, a step':44}{'ms':>9}{'floor ms':>10}{'of it':>8}{'eager ms':>10}")
    base_ms = {}
    for rows in DECODES:
        base_ms[rows] = took = decode_ms(executor, [-1] * rows)
        executor.replay(graphs=False)
        eager = decode_ms(executor, [-1] * rows)
        executor.replay(graphs=True)
        work = step_work([(CONTEXT, 1)] * rows, [], rows)
        floor = work.floor_ms(bandwidth, rate)
        name = f"decode of {rows}, context {CONTEXT}"
        print(f"{name:44}{took:9.3f}{floor:10.3f}{floor / took:8.0%}{eager:10.3f}")
    for tokens in PREFILLS:
        params, prompt = SamplingParams(4, 0.0), [1] * tokens
        start, row = SequenceStart(0, prompt, [], params, 0), PlanRow(
            0, 0, prompt, list(range(tokens // 16)), -1, True)  # fmt: skip
        took = milliseconds(
            lambda start=start, row=row: executor.execute(StepPlan(0, [0], [start], [], [row])), 10
        )
        floor = step_work([(0, tokens)], [], 1).floor_ms(bandwidth, rate)
        print(f"{f'prefill of {tokens}':44}{took:9.3f}{floor:10.3f}{floor / took:8.0%}")
    blobs = {rank: blob_of(executor, rank) for rank in RANKS}
    speed = load_adapters(executor, blobs, max(ADAPTERS))
    print(f"\n{max(ADAPTERS)} adapters of ranks {RANKS} loaded at {speed / 1e9:.1f} GB/s")
    print(f"{f'decode of {ADAPTER_ROWS} with adapters':44}{'ms':>9}{'floor ms':>10}{'/ base':>8}")
    for count in ADAPTERS:
        slots = [row % count for row in range(ADAPTER_ROWS)]
        ranks = [RANKS[slot % len(RANKS)] for slot in slots]
        took = decode_ms(executor, slots)
        work = step_work([(CONTEXT, 1)] * ADAPTER_ROWS, ranks, ADAPTER_ROWS)
        work += adapter_work([RANKS[slot % len(RANKS)] for slot in range(count)])
        floor = work.floor_ms(bandwidth, rate)
        print(
            f"{f'{count} adapters':44}{took:9.3f}{floor:10.3f}{took / base_ms[ADAPTER_ROWS]:8.2f}"
        )
    beside_loads(executor, blobs[max(RANKS)])


def beside_loads(
    executor: CudaExecutor, blob: AdapterBlob, slot: int = 127, rows: int = 64
) -> None:
    """Decode steps with one adapter after the other on its way, against those without."""
    batch = Batch(executor, [0] * rows, CONTEXT)
    batch.start()
    alone = milliseconds(batch.decode, 2 * REPEATS)
    arrived = 0
    place = rows * batch.blocks

    def decode_and_load() -> None:
        nonlocal arrived
        if executor.poll_copies(0) == [slot]:
            arrived += 1
            executor.drop_adapter(slot)
            executor.start_copy(slot, place, blob)
        batch.decode()

    executor.start_copy(slot, place, blob)
    beside = milliseconds(decode_and_load, 2 * REPEATS - 4)
    executor.drop_adapter(slot)
    batch.close()
    print(f"\ndecode of {rows} alone {alone:.3f} ms; while adapters of rank {max(RANKS)} arrive "
          f"{beside:.3f} ms ({beside / alone:.2f} x, {arrived} arrived)")  # fmt: skip
