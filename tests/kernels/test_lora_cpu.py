"""The CPU faces of multi-LoRA against the plain reference."""

import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from engine.kernels.lora import Lora, open_lora
from engine.kernels.lora_cpu import CompiledLora
from engine.kernels.lora_torch import TorchLora
from engine.kernels.reference import ReferenceLora
from engine.native.build import load
from tests.kernels.lora_cases import Case, assert_matches
from tests.kernels.lora_strategies import cases

LIBRARY = load()


def native_lora(*arguments: Any, **options: Any) -> Lora:
    """The native library's pass where adapters are bf16, as the engine opens it."""
    return open_lora(
        *arguments, max_rows=128, max_rank=400, compiled=LIBRARY and LIBRARY.adapters, **options
    )


FACES = [CompiledLora, TorchLora, native_lora]
TOLERANCE = {native_lora: 1e-4}  # x and x A^T are two bf16 terms each
EXAMPLES = [
    Case(64, (32, 16, 48), [(8, 8, 8, 8)], []),  # nothing to do
    Case(64, (32, 16, 48), [(8, 8, 8, 8)], [-1] * 5),  # nobody uses an adapter
    Case(33, (17, 5, 1), [(1, 0, 256, 3), (0, 7, 0, 0)], [1, -1, 0, 1, 0]),  # odd everything
    Case(64, (32, 16, 48), [(0, 0, 0, 0)], [0, 0]),  # an adapter of other layers
    Case(64, (32, 9000, 48), [(16, 16, 16, 1)], [0] * 5),  # a slice wider than a unit of work
    Case(48, (32, 16, 48), [(16, 8, 4, 2), (64, 1, 2, 3)], [0, 1] * 40),  # more rows than a chunk
    Case(64, (32, 48, 4200), [(400, 272, 16, 8)], [0, 0]),  # larger ranks than usual
]


@pytest.fixture(autouse=True)
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def filled(face: type[Lora], case: Case, **options: object) -> tuple[Lora, Lora]:
    """A face and the reference over one arena."""
    arena, layouts, first_bytes = case.arena()
    lora = face(arena, case.modules, slots=4, dtype=case.dtype, **options)
    reference = ReferenceLora(arena, case.modules, slots=4, dtype=case.dtype)
    for each in (lora, reference):
        case.fill(each, layouts, first_bytes)
    return lora, reference


@pytest.mark.parametrize("face", FACES)
class TestAgainstTheReference:
    @given(case=cases())
    @settings(max_examples=60, deadline=None)
    def test_any_mix_of_ranks_targets_and_rows_is_right(self, face, case):
        assert_matches(case, *filled(face, case), TOLERANCE.get(face, 2e-5))

    @pytest.mark.parametrize("case", EXAMPLES)
    def test_the_corners_are_right(self, face, case):
        assert_matches(case, *filled(face, case), TOLERANCE.get(face, 2e-5))

    def test_rows_of_a_wider_tensor_are_written_in_place(self, face):
        case = Case(64, (32, 16, 48), [(8, 4, 2, 1)], [0, -1, 0])
        lora, reference = filled(face, case)
        batch = lora.new_batch(3)
        batch.build(case.row_slots)
        x, _, y = case.inputs(case.fused)
        wide, expected = torch.zeros(3, 200), y.clone()
        wide[:, 7:103] = y
        reference.linear(case.fused, batch, x, expected)
        lora.linear(case.fused, batch, x, wide[:, 7:103])
        torch.testing.assert_close(wide[:, 7:103], expected, rtol=1e-5, atol=1e-3)
        assert not wide[:, :7].any()
        assert not wide[:, 103:].any()

    def test_a_dropped_slot_changes_nothing(self, face):
        case = Case(64, (32, 16, 48), [(8, 4, 2, 1)], [0, 0])
        lora, _ = filled(face, case)
        lora.drop(0)
        batch = lora.new_batch(2)
        batch.build(case.row_slots)
        x, _, y = case.inputs(case.fused)
        after = y.clone()
        lora.linear(case.fused, batch, x, after)
        assert torch.equal(after, y)

    def test_a_moved_adapter_gives_the_same_bits(self, face):
        case = Case(64, (32, 16, 48), [(8, 4, 2, 1)], [0, 0, 0])
        arena, layouts, first_bytes = case.arena()
        roomy = torch.cat([arena, torch.full_like(arena, 0xFF)])
        lora = face(roomy, case.modules, slots=1, dtype=case.dtype)
        batch = lora.new_batch(3)
        batch.build(case.row_slots)
        x, _, y = case.inputs(case.fused)
        results = []
        for first_byte in (first_bytes[0], first_bytes[0] + arena.numel() // 64 * 64):
            nbytes = layouts[0].nbytes
            source = roomy[first_bytes[0] : first_bytes[0] + nbytes].clone()
            roomy[first_byte : first_byte + nbytes] = source
            lora.activate(0, layouts[0], first_byte)
            results.append(y.clone())
            lora.linear(case.fused, batch, x, results[-1])
        assert torch.equal(*results)
        assert not torch.equal(results[0], y)

    @given(case=cases(max_rows=12, max_rank=64))
    @settings(max_examples=20, deadline=None)
    def test_batch_invariant_rows_equal_the_row_alone_in_every_bit(self, face, case):
        lora, _ = filled(face, case, batch_invariant=True)
        x, _, y = case.inputs(case.fused)
        together = y.clone()
        batch = lora.new_batch(12)
        batch.build(case.row_slots)
        lora.linear(case.fused, batch, x, together)
        for row, slot in enumerate(case.row_slots):
            batch.build([slot])
            alone = y[row : row + 1].clone()
            lora.linear(case.fused, batch, x[row : row + 1], alone)
            assert torch.equal(alone[0], together[row])


class TestTheCompiledPass:
    def test_more_threads_change_no_bit(self):
        case = Case(64, (300, 64, 33), [(16, 8, 4, 2), (64, 1, 2, 3)], [0, 1, -1] * 20)
        lora, _ = filled(CompiledLora, case)
        batch = lora.new_batch(60)
        batch.build(case.row_slots)
        x, _, y = case.inputs(case.fused)
        results = []
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(y.clone())
            lora.linear(case.fused, batch, x, results[-1])
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])

    def test_rows_in_another_dtype_are_refused(self):
        case = Case(64, (32, 16, 48), [(8, 4, 2, 1)], [0])
        lora, _ = filled(CompiledLora, case)
        batch = lora.new_batch(1)
        batch.build([0])
        x, _, y = case.inputs(case.fused)
        with pytest.raises(ValueError, match="fp32"):
            lora.linear(case.fused, batch, x.bfloat16(), y)


class TestOpening:
    def test_the_cpu_gets_the_compiled_pass(self):
        case = EXAMPLES[0]
        options = {"slots": 1, "max_rows": 8, "max_rank": 64, "dtype": "bf16"}
        assert isinstance(open_lora(case.arena()[0], case.modules, **options), CompiledLora)

    def test_without_numba_torch_serves(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "numba", None)
        for module in ("engine.kernels.lora_cpu", "engine.kernels.lora_numba"):
            monkeypatch.delitem(sys.modules, module)
        case = EXAMPLES[0]
        options = {"slots": 1, "max_rows": 8, "max_rank": 64, "dtype": "bf16"}
        assert isinstance(open_lora(case.arena()[0], case.modules, **options), TorchLora)
