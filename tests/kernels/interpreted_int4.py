"""The 4-bit linear under Triton's interpreter, against the plain reference."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.kernels.int4_cuda import TritonInt4
from engine.kernels.int4_triton import TILES
from tests.kernels.int4_cases import CASES, Int4Case, error, relative_error

TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3}  # the result's own rounding


def gemm(batch_invariant: bool = False) -> TritonInt4:
    return TritonInt4(torch.device("cpu"), max_out_features=512, batch_invariant=batch_invariant)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_any_shape_is_right(case):
    assert error(case, gemm()) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("name", TILES)
def test_every_tile_is_right_for_every_group(name):
    face, tile = gemm(), TILES[name]
    for group, symmetric in ((32, True), (64, False), (128, True)):
        case = Int4Case(19, 140, 640, group, symmetric)
        for _ in range(2):  # the counters of arrived parts are back at 0
            actual = face.linear_with(tile, case.x(), case.packed())
            assert relative_error(actual, case.expected()) < TOLERANCE[case.dtype]


def test_a_split_beyond_its_room_is_refused():
    case = Int4Case(40)
    with pytest.raises(ValueError, match="splits"):
        gemm().linear_with(TILES["16"], case.x(), case.packed())


@st.composite
def shapes(draw: st.DrawFn) -> Int4Case:
    group = draw(st.sampled_from([32, 64, 128]))
    return Int4Case(
        rows=draw(st.one_of(st.integers(0, 40), st.sampled_from([64, 65, 128, 200]))),
        out_features=draw(st.integers(1, 300)),
        in_features=group * draw(st.integers(1, 6)),
        group=group,
        symmetric=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float16])),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.wide
@given(case=shapes(), batch_invariant=st.booleans())
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_random_shapes_are_right(case, batch_invariant):
    assert error(case, gemm(batch_invariant)) < TOLERANCE[case.dtype]
