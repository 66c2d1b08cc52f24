"""The 4-bit linear on a GPU against the plain reference."""

import pytest
import torch

from engine.kernels.int4_cuda import TritonInt4
from engine.kernels.int4_triton import TILES
from tests.kernels.int4_cases import CASES, Int4Case, error, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOLERANCE = 2e-2  # weights and results are rounded to 8 bits of mantissa
LARGE = {
    "a decode": Int4Case(8, 4096, 4096, 128),
    "a prompt's chunk": Int4Case(512, 6144, 4096, 128, symmetric=False),
}


def gemm(batch_invariant: bool = False) -> TritonInt4:
    device = torch.device("cuda")
    return TritonInt4(device, max_out_features=8192, batch_invariant=batch_invariant)


def tiles() -> list[str]:
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    return [name for name in TILES if hopper or name != "128"]


@pytest.mark.parametrize("name", [*CASES, *LARGE])
def test_any_shape_is_right(name):
    assert error({**CASES, **LARGE}[name], gemm(), "cuda") < TOLERANCE


@pytest.mark.parametrize("name", tiles())
def test_codes_read_by_their_bits_give_what_plain_arithmetic_gives(name):
    face = gemm()
    for dtype in (torch.bfloat16, torch.float16):
        for group, symmetric in ((32, True), (64, False), (128, True)):
            case = Int4Case(19, 520, 1024, group, symmetric, dtype)
            x, weight = case.x("cuda"), case.packed("cuda")
            by_bits = face.linear_with(TILES[name], x, weight)
            plain = face.linear_with(TILES[name], x, weight, by_bits=False)
            assert torch.equal(by_bits, plain)
            assert relative_error(by_bits, case.expected()) < TOLERANCE


def test_the_same_call_gives_the_same_bits_every_time():
    case = Int4Case(8, 4096, 4096)
    face, x, weight = gemm(), case.x("cuda"), case.packed("cuda")
    first = face.linear(x, weight)
    assert all(torch.equal(first, face.linear(x, weight)) for _ in range(100))


def test_a_row_alone_has_the_same_bits_in_batch_invariant_mode():
    case = Int4Case(200, 1024, 1024, symmetric=False)
    face, x, weight = gemm(batch_invariant=True), case.x("cuda"), case.packed("cuda")
    together = face.linear(x, weight)
    for row in range(0, 200, 17):
        assert torch.equal(face.linear(x[row : row + 1], weight)[0], together[row])
