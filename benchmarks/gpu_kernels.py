"""The kernels around multi-LoRA at the shapes of an 8B Llama: checked, then timed (`gpu`)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks import roofline
from benchmarks.roofline import Work
from engine.draws import Draw
from engine.kernels import fp8, pointwise, reference, sample
from engine.kernels.attention_cuda import TritonAttention
from engine.kernels.int4 import TorchInt4, pack
from engine.kernels.int4_cuda import TritonInt4
from engine.model.attention import QueryChunk
from engine.model.config import ModelConfig, RopeScaling
from engine.model.kv_cache import KvCache, block_bytes
from engine.model.quantization import GROUP, Int4Codes

HIDDEN, INNER, VOCABULARY = 4096, 14336, 128256
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
DECODES = (1, 32, 128)


@dataclass(frozen=True)
class Case:
    """One call, how far it is from its reference (of the largest value), and what it moves."""

    name: str
    call: Callable[[], object]
    error: Callable[[], float]
    work: Work


def cases() -> Iterator[Case]:
    """Made one at a time: each frees what the one before it held."""
    yield from _pointwise()
    yield from _attention()
    yield from _int4()
    yield from _fp8()
    yield from _sample()


def difference(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, of the largest value."""
    return float((actual.float() - expected.float()).abs().max() / expected.float().abs().max())


def _randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _pointwise() -> Iterator[Case]:
    weight = _randn(HIDDEN)
    for rows in (32, 1024):
        x, update, gate_up = _randn(rows, HIDDEN), _randn(rows, HIDDEN), _randn(rows, 2 * INNER)

        def norm(x: Tensor = x, update: Tensor = update) -> Tensor:
            return pointwise.add_rms_norm(x, update, weight, 1e-5)

        def norm_error(x: Tensor = x, update: Tensor = update) -> float:
            expected = reference.add_rms_norm(x.clone(), update, weight, 1e-5)
            return difference(pointwise.add_rms_norm(x.clone(), update, weight, 1e-5), expected)

        work = roofline.norm(rows, HIDDEN, residual=True)
        yield Case(f"norm with residual, {rows} rows", norm, norm_error, work)

        def gate(y: Tensor = gate_up) -> Tensor:
            return pointwise.silu_gate(y)

        def gate_error(y: Tensor = gate_up) -> float:
            return difference(pointwise.silu_gate(y), reference.silu_gate(y))

        yield Case(f"gate, {rows} rows", gate, gate_error, roofline.silu_gate(rows, INNER))


def _attention() -> Iterator[Case]:
    config = ModelConfig(
        "LlamaForCausalLM", VOCABULARY, HIDDEN, INNER, 1, HEADS, KV_HEADS, HEAD_DIM, 1e-5, 5e5,
        RopeScaling(), 8192, False, (0,),
    )  # fmt: skip
    steps = {f"decode of {rows}, context 1024": [(1023, 1)] * rows for rows in DECODES}
    steps["decode of 1, context 8192"] = [(8191, 1)]
    steps["prefill of 512 after 1024"] = [(1024, 512)]
    blocks = max(DECODES) * 1024 // 16
    arena = torch.empty(blocks * block_bytes(config, "bf16"), dtype=torch.uint8, device="cuda")
    arena.view(torch.bfloat16).normal_()
    cache = KvCache(arena, config, "bf16")
    for name, step in steps.items():
        chunks, first, used = [], 0, 0
        for start, count in step:
            size = -(-(start + count) // 16)
            chunks.append(QueryChunk(first, count, start, np.arange(used, used + size)))
            first, used = first + count, used + size
        attention = TritonAttention(cache, max_rows=1024, max_blocks=blocks)
        attention.build(chunks)
        q = _randn(first, HEADS, HEAD_DIM)

        def attend(attention: TritonAttention = attention, q: Tensor = q) -> Tensor:
            return attention.attend(0, q, q, q)

        def error(call: Callable[[], Tensor] = attend, q: Tensor = q) -> float:
            # the first sequence's last query: the reference takes them one at a time
            last = chunks[0].count - 1  # noqa: B023 - called before the next step is made
            one = QueryChunk(last, 1, chunks[0].start + last, chunks[0].table)  # noqa: B023
            expected = reference.paged_attention(cache, 0, [one], q)[last]
            return difference(call()[last], expected.flatten())

        yield Case(name, attend, error, roofline.attention(step, HEADS, KV_HEADS, HEAD_DIM))


def random_codes(out: int, width: int) -> Int4Codes:
    """Symmetric, groups of 128."""
    generator = np.random.default_rng(0)
    q = generator.integers(0, 16, (out, width), dtype=np.uint8)
    scale = generator.uniform(0.01, 0.02, (out, width // 128)).astype(np.float32)
    scale = np.repeat(scale, 128 // GROUP, axis=1)
    return Int4Codes(q, scale, np.zeros_like(scale))


def _int4() -> Iterator[Case]:
    gemm, plain = TritonInt4(torch.device("cuda"), max_out_features=2 * INNER), TorchInt4()
    for name, out, width in (("qkv", 6144, HIDDEN), ("gate_up", 2 * INNER, HIDDEN)):
        weight = pack(random_codes(out, width), torch.bfloat16, "cuda")
        for rows in (1, 16, 32, 64, 128, 1024):
            x = _randn(rows, width)

            def call(x: Tensor = x) -> Tensor:
                return gemm.linear(x, weight)  # noqa: B023 - called before the next weight is made

            def error(x: Tensor = x) -> float:
                return difference(gemm.linear(x, weight), plain.linear(x, weight))  # noqa: B023

            work = roofline.int4_linear(rows, out, width, 128, zeros=False)
            yield Case(f"int4 {name}, {rows} rows", call, error, work)


def _fp8() -> Iterator[Case]:
    if torch.cuda.get_device_capability() < (9, 0):
        return
    bits = np.random.default_rng(0).integers(0, 127, (6144, HIDDEN), dtype=np.uint8)
    scale = np.ones((1, 1), np.float32)
    weight = fp8.pack(bits, scale, "cuda")
    for rows in (16, 1024):
        x = _randn(rows, HIDDEN)

        def call(x: Tensor = x) -> Tensor:
            return fp8.linear(x, weight)

        def error(x: Tensor = x) -> float:
            expected = reference.fp8_linear(x[:4], bits, scale, rounds=True)
            return difference(fp8.linear(x, weight)[:4].cpu(), expected)

        yield Case(f"fp8 qkv, {rows} rows", call, error, roofline.fp8_linear(rows, 6144, HIDDEN))


def _sample() -> Iterator[Case]:
    for rows in DECODES:
        logits = torch.randn(rows, VOCABULARY, device="cuda") * 3
        for name, draw in {
            "greedy": None,
            "temperature": Draw(0.5, 1.0, 0, 1.0, 0.0),
            "top-p": Draw(0.5, 1.0, 0, 0.9, 0.0),
            "top-k, top-p": Draw(0.5, 1.0, 50, 0.9, 0.0),
        }.items():
            asked = torch.from_numpy(sample.parameters([draw] * rows)).cuda()

            def call(logits: Tensor = logits, asked: Tensor = asked) -> Tensor:
                return sample.sample(logits, asked)

            def error(logits: Tensor = logits, asked: Tensor = asked) -> float:
                actual = sample.sample(logits[:8], asked[:8]).cpu()
                expected = reference.sample(logits[:8].cpu(), asked[:8].cpu())
                return float((actual != expected).float().mean()) / 100  # an edge may be rounded

            work = roofline.sample(rows, VOCABULARY)
            yield Case(f"sample {name}, {rows} rows", call, error, work)
