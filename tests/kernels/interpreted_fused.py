"""The 4-bit linear that adds its rows' adapters, under Triton's interpreter."""

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engine.kernels import fuse
from engine.kernels.int4_cuda import TritonInt4
from engine.kernels.int4_triton import TILES, choose_tile
from tests.kernels.fused_cases import CASES, FusedCase
from tests.kernels.int4_cases import relative_error


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_fused_equals_the_reference_and_leaves_base_rows_alone(case):
    fused, separate = case.run(fuse=True), case.run(fuse=False)
    assert relative_error(fused, case.expected()) < 8e-3
    assert relative_error(separate, case.expected()) < 1.6e-2  # rounded twice
    base = torch.tensor([slot < 0 for slot in case.row_slots], dtype=torch.bool)
    assert torch.equal(fused[base], separate[base])


def test_batch_invariant_mode_is_right_too():
    case = CASES["two tiles of rows"]
    assert relative_error(case.run(fuse=True, batch_invariant=True), case.expected()) < 8e-3


def test_separate_is_what_runs_until_the_table_names_a_shape(monkeypatch):
    case = FusedCase((0, 1, -1), ((8, 16, 3, 0), (16, 0, 1, 0)))
    fused, separate = case.run(fuse=True), case.run(fuse=False)
    assert not torch.equal(fused, separate)  # only the latter rounds before it adds
    assert torch.equal(case.run(fuse=None), separate)
    shape = (case.base.out_features, case.in_features)
    for most, expected in ((2, fused), (1, separate)):
        monkeypatch.setitem(fuse.MOST_ADAPTERS, shape, most)
        assert torch.equal(case.run(fuse=None), expected)


def test_rows_of_many_adapters_are_right_in_the_tile_that_holds_their_planes(monkeypatch):
    launched = []
    linear_with = TritonInt4.linear_with

    def noted(gemm, tile, x, weight, added=None):
        launched.append((tile, 0 if added is None else added.planes))
        return linear_with(gemm, tile, x, weight, added)

    monkeypatch.setattr(TritonInt4, "linear_with", noted)
    case = FusedCase((*range(4),) * 32, ((8, 0, 0, 0),) * 4, in_features=128, capability=90)
    assert relative_error(case.run(fuse=True), case.expected()) < 8e-3
    assert launched == [(TILES["64"], 8)]
    assert choose_tile(128, group=128, capability=90, planes=1) is TILES["128"]


rank = st.one_of(st.just(0), st.integers(1, 256), st.sampled_from([8, 16, 64]))
row_slots = st.sampled_from([1, 15, 17, 33, 70]).flatmap(  # below and above the tiles' edges
    lambda count: st.lists(st.integers(-1, 3), min_size=count, max_size=count)
)


@pytest.mark.wide
@given(
    ranks=st.lists(st.tuples(rank, rank, rank, rank), min_size=1, max_size=4),
    rows=row_slots,
    group=st.sampled_from([32, 64, 128]),
    symmetric=st.booleans(),
    seed=st.integers(0, 99),
)
@example([(9, 0, 130, 4), (64, 1, 0, 8)], [0, 1, -1] * 11, 32, False, 1)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_any_mix_is_right(ranks, rows, group, symmetric, seed):
    slots = tuple(min(slot, len(ranks) - 1) for slot in rows)
    case = FusedCase(slots, tuple(ranks), group, symmetric, seed=seed)
    assert relative_error(case.run(fuse=True), case.expected()) < 8e-3


def test_slices_that_tiles_would_straddle_cannot_be_fused():
    case = CASES["one row"].adapters
    assert fuse.fusable(case.fused, 128)
    assert not fuse.fusable(case.fused, 96)
