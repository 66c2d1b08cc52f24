"""The packed layout of 4-bit weights, and its torch face against the plain reference."""

import numpy as np
import pytest
import torch

from engine.kernels.int4 import TorchInt4, open_int4, pack
from tests.kernels.int4_cases import CASES, Int4Case, error


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_torch_face_equals_the_reference(case):
    assert error(case, TorchInt4()) < 8e-3


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("symmetric", [True, False])
def test_packing_keeps_every_code_and_finds_the_groups(group, symmetric):
    case = Int4Case(1, 70, 384, group, symmetric)
    weight = case.packed()
    assert weight.group == group
    assert (weight.zero is None) == symmetric
    codes = case.codes()
    scale, zero = (
        torch.from_numpy(part).bfloat16().float().repeat_interleave(32, 1)
        for part in (codes.scale, codes.zero)
    )
    stored = (torch.from_numpy(codes.q).float() - 8) * scale + zero
    assert torch.equal(weight.dequantize(), stored)


def test_a_word_holds_four_columns_32_apart():
    codes = Int4Case(1, 70, 384).codes()
    word = int(pack(codes, torch.bfloat16).words[1, 2, 5, 7]) & 0xFFFF
    nibbles = [word >> shift & 15 for shift in (0, 4, 8, 12)]
    assert nibbles == codes.q[64 + 5, 256 + 7 + 32 * np.arange(4)].tolist()


def test_half_a_byte_a_weight_and_its_scales():
    weight = Int4Case(1, 256, 512, 128, symmetric=False).packed()
    assert weight.nbytes == 256 * 512 // 2 + 2 * 2 * 256 * 4


def test_the_cpu_gets_the_torch_face():
    assert isinstance(open_int4(torch.device("cpu"), max_out_features=64), TorchInt4)
