"""The Triton kernels of multi-LoRA under Triton's interpreter, against the plain reference.

Started by `test_lora_triton.py` with TRITON_INTERPRET=1.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.kernels.lora_cuda import TritonLora
from engine.kernels.lora_triton import TILES, choose_tile
from engine.kernels.reference import ReferenceLora
from tests.kernels.lora_cases import Case, assert_matches
from tests.kernels.lora_strategies import cases

SWEEP = settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
EXAMPLES = {
    "no rows": Case(64, (32, 16, 48), [(8, 8, 8, 8)], []),
    "base rows only": Case(64, (32, 16, 48), [(8, 8, 8, 8)], [-1] * 5),
    "one row": Case(600, (130, 16, 48), [(5, 16, 33, 8)], [0]),
    "odd widths and the largest rank": Case(
        33, (17, 5, 1), [(1, 0, 256, 3), (0, 7, 0, 0)], [1, -1, 0, 1, 0]
    ),
    "an adapter of other layers": Case(64, (32, 16, 48), [(0, 0, 0, 0), (1, 2, 3, 4)], [0, 1]),
    "more rows than a chunk": Case(48, (32, 16, 48), [(16, 8, 4, 2), (64, 1, 2, 3)], [0, 1] * 20),
    "one long prompt": Case(300, (32, 16, 140), [(16, 8, 4, 2)], [0] * 70),
}


def check(case: Case, batch_invariant: bool = False) -> TritonLora:
    arena, layouts, first_bytes = case.arena()
    lora = TritonLora(
        arena,
        case.modules,
        slots=4,
        max_rows=128,
        max_rank=256,
        dtype=case.dtype,
        batch_invariant=batch_invariant,
    )
    reference = ReferenceLora(arena, case.modules, slots=4, dtype=case.dtype)
    for each in (lora, reference):
        case.fill(each, layouts, first_bytes)
    assert_matches(case, lora, reference)
    return lora


@given(case=cases(max_rows=12, max_rank=40))
@SWEEP
def test_any_mix_of_ranks_targets_and_rows_is_right(case):
    check(case)


@pytest.mark.wide
@given(case=cases(max_rows=40, max_rank=256), batch_invariant=st.booleans())
@settings(SWEEP, max_examples=30)
def test_any_mix_of_ranks_up_to_256_is_right(case, batch_invariant):
    check(case, batch_invariant)


@pytest.mark.parametrize("case", EXAMPLES.values(), ids=EXAMPLES)
def test_the_corners_are_right(case):
    check(case)


@pytest.mark.parametrize("name", TILES)
def test_every_tile_is_right(name, monkeypatch):
    monkeypatch.setattr("engine.kernels.lora_cuda.choose_tile", lambda rows, adapters: TILES[name])
    check(Case(600, (130, 16, 48), [(24, 0, 33, 8), (1, 2, 3, 4)], [0, 1, -1, 0, 1] * 7))


def test_a_dropped_slot_changes_nothing():
    case = Case(64, (32, 16, 48), [(8, 4, 2, 1)], [0, 0])
    lora = check(case)
    lora.drop(0)
    batch = lora.new_batch(2)
    batch.build(case.row_slots)
    x, _, y = case.inputs(case.fused)
    after = y.clone()
    lora.linear(case.fused, batch, x, after)
    assert torch.equal(after, y)


def test_batch_invariant_mode_has_one_tile_whatever_the_batch():
    case = Case(64, (40, 16, 48), [(24, 0, 33, 8), (1, 1, 1, 1)], [0] * 40)
    batch = check(case, batch_invariant=True).new_batch(100)
    for row_slots in ([0], [0, 1] * 5, [0] * 100):
        batch.build(row_slots)
        assert batch.tile is TILES["whole"]


def test_the_tile_follows_the_shape_of_the_batch():
    assert choose_tile(adapter_rows=16, adapters=16) is TILES["split"]
    assert choose_tile(adapter_rows=600, adapters=300) is TILES["whole"]
    assert choose_tile(adapter_rows=600, adapters=4) is TILES["long"]


def test_one_grid_serves_every_mix_of_ranks_and_rows_with_the_same_bits():
    case = Case(600, (130, 16, 48), [(24, 0, 33, 8), (1, 2, 3, 4)], [0, 1, -1, 0, 1] * 3)
    lora = check(case)
    batch = lora.new_batch(32)
    for row_slots in (case.row_slots, [1], [-1, -1], [0] * 20):
        rows = len(row_slots)
        x, y = torch.randn(rows, 600), torch.randn(rows, 194)
        exact, held = y.clone(), y.clone()
        batch.grid = None
        batch.build(row_slots)
        tile = batch.tile
        lora.linear(case.fused, batch, x, exact)
        batch.grid = batch.decode_grid(32, 64)
        batch.build(row_slots)
        assert batch.tile is TILES["split"]
        lora.linear(case.fused, batch, x, held)
        assert torch.equal(held, exact) or tile is not TILES["split"]


def test_a_placed_batch_is_read_where_it_was_brought():
    case = Case(64, (32, 16, 48), [(8, 4, 2, 1)], [0, -1, 0])
    lora = check(case)
    batch = lora.new_batch(4)
    place = torch.zeros(batch.buffer.size, dtype=torch.int32)
    batch.place(place)
    batch.build(case.row_slots)
    x, _, y = case.inputs(case.fused)
    before, after = y.clone(), y.clone()
    lora.linear(case.fused, batch, x, before)
    place.copy_(torch.from_numpy(batch.buffer))
    lora.linear(case.fused, batch, x, after)
    assert torch.equal(before, y)
    assert not torch.equal(after, y)


def test_the_planes_of_a_split_stay_inside_their_buffer_for_the_largest_batch():
    case = Case(64, (32, 16, 48), [(8, 4, 2, 1)], [0, -1, 0])
    arena, layouts, first_bytes = case.arena()
    lora = TritonLora(arena, case.modules, slots=4, max_rows=700, max_rank=16, dtype=case.dtype)
    case.fill(lora, layouts, first_bytes)
    size = lora._hidden.numel()
    lora._hidden = torch.full((4 * size,), torch.nan)
    batch = lora.new_batch(700)
    batch.build(case.row_slots)
    x, _, y = case.inputs(case.fused)
    lora.linear(case.fused, batch, x, y)
    assert lora._hidden[size:].isnan().all()
    assert not lora._hidden[:size].isnan().all()
