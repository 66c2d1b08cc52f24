"""4-bit linears: every product of a layer, every group, with and without zeros, bf16 and fp16."""

import functools
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks import roofline
from benchmarks.kernels_parts.case import Case, Target, Trial, difference
from engine.kernels import reference
from engine.kernels.int4 import PackedInt4, pack
from engine.model.linear import Linear, choose_path
from engine.model.quantization import GROUP, Floats, Int4Codes
from engine.model.weights import Weight

NAMES = ("qkv", "o", "gate_up", "down")
GROUPS = (32, 64, 128)
BF16 = torch.bfloat16


def cases(target: Target) -> Iterator[Case]:
    linears = zip(NAMES, target.shape.linears(), strict=True)
    rows = (*target.sizes.decodes, target.sizes.prompt)
    for name, (_, width, out) in linears:
        for count in rows:
            yield (_triton if target.triton else _torch)(target, name, count, out, width)
    if target.triton:
        _, width, out = target.shape.linears()[0]
        one, prompt = target.sizes.decodes[0], target.sizes.prompt
        for group in GROUPS:
            for zeros in (False, True):
                for count, dtype in ((one, BF16), (one, torch.float16), (prompt, BF16)):
                    yield _variant(target, count, out, width, group, zeros, dtype)


@functools.lru_cache(maxsize=1)
def random_codes(out: int, width: int, group: int = 128, zeros: bool = False) -> Int4Codes:
    """A matrix [out, width] whose scales, and zeros where they are asked for, repeat by group."""
    generator = np.random.default_rng(0)
    group = group if width % group == 0 else GROUP
    q = generator.integers(0, 16, (out, width), dtype=np.uint8)
    scale = generator.uniform(0.01, 0.02, (out, width // group)).astype(np.float32)
    zero = scale * generator.integers(-3, 4, scale.shape).astype(np.float32) * zeros
    scale, zero = (np.repeat(part, group // GROUP, axis=1) for part in (scale, zero))
    return Int4Codes(q, scale, zero)


@functools.lru_cache(maxsize=1)
def packed(
    out: int, width: int, group: int, zeros: bool, dtype: torch.dtype, device: torch.device
) -> PackedInt4:
    """Of `random_codes`; packing takes seconds, and cases of one weight follow each other."""
    return pack(random_codes(out, width, group, zeros), dtype, device)


def _variant(
    target: Target, rows: int, out: int, width: int, group: int, zeros: bool, dtype: torch.dtype
) -> Case:
    kind = str(dtype).removeprefix("torch.")
    name = f"int4 groups of {group}{' with zeros' if zeros else ''}, {kind}, {rows} rows"
    return _gemm_case(target, name, rows, out, width, group, zeros, dtype, compares_bits=True)


def _triton(target: Target, name: str, rows: int, out: int, width: int) -> Case:
    full = f"int4 {name}, {rows} rows"
    return _gemm_case(target, full, rows, out, width, 128, False, BF16)


def _gemm_case(
    target: Target, name: str, rows: int, out: int, width: int, group: int, zeros: bool,
    dtype: torch.dtype, *, compares_bits: bool = False,
) -> Case:  # fmt: skip
    """`compares_bits`: the codes are also read by plain arithmetic, which is compiled for it."""

    def opened() -> Trial:
        from engine.kernels.int4_cuda import TritonInt4

        codes = random_codes(out, width, group, zeros)
        weight = packed(out, width, group, zeros, dtype, target.device)
        gemm = TritonInt4(target.device, max_out_features=out)
        x = target.randn(rows, width).to(dtype)

        def error() -> float:
            """Infinite where reading codes by their bits gives other bits than arithmetic."""
            actual, tile = gemm.linear(x, weight), gemm.tile(rows, weight)
            if compares_bits and not torch.equal(
                actual, gemm.linear_with(tile, x, weight, by_bits=False)
            ):
                return float("inf")
            return difference(actual, reference.int4_linear(x, codes, dtype))

        return Trial(lambda: gemm.linear(x, weight), error)

    known = group if width % group == 0 else GROUP
    return Case(name, roofline.int4_linear(rows, out, width, known, zeros=zeros), opened)


class CodesWeight(Weight):
    """A matrix as its codes are."""

    def __init__(self, codes: Int4Codes) -> None:
        self.shape = codes.q.shape
        self._codes = codes

    @property
    def has_int4(self) -> bool:
        return True

    def int4(self, start: int = 0, stop: int | None = None) -> Int4Codes:
        return self._codes.rows(start, stop)

    def decode(self, start: int = 0, stop: int | None = None) -> Floats:
        part, codes = slice(start, stop), self._codes
        scale, zero = (np.repeat(each[part], GROUP, axis=1) for each in (codes.scale, codes.zero))
        return (codes.q[part].astype(np.float32) - 8) * scale + zero

    def take(self, indices: np.ndarray) -> Floats:
        return np.concatenate([self.decode(int(index), int(index) + 1) for index in indices])


def _torch(target: Target, name: str, rows: int, out: int, width: int) -> Case:
    """As the CPU engine chooses without its native library; groups of 32, as torch's kernel."""

    def opened() -> Trial:
        codes = random_codes(out, width, GROUP)
        choice = choose_path("auto", batch_invariant=False, fast_bf16=False)
        linear, x = Linear([CodesWeight(codes)], choice), target.randn(rows, width)
        return Trial(
            lambda: linear(x),
            lambda: difference(linear(x), reference.int4_linear(x, codes, torch.float32)),
        )

    work = roofline.int4_linear(rows, out, width, GROUP, zeros=True)
    return Case(f"int4 {name}, torch, {rows} rows", work, opened)
