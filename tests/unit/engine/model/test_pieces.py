"""Weights that are decoded and repacked piece by piece have the bits of those that are whole."""

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.cuda.int4_forms import kept_int4
from engine.huge_pages import zeros
from engine.model import linear
from engine.model.form_cache import NOTHING_KEPT
from engine.model.loader import open_checkpoint
from engine.model.weights import Weight, row_pieces, stacked_int4
from engine.native import layout
from tests.checkpoint_formats import FORMATS
from tests.model_factories import make_llama

QKV = [f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv"]
GATE_UP = [f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up")]
WITH_CODES = [
    "awq", "gptq", "gptq, second format", "compressed-tensors int4", "GGUF Q4_0", "GGUF Q4_1",
]  # fmt: skip
SMALL, WHOLE = 1, 1 << 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("formats")


def weights_of(kind: str, folder: Path, names: list[str]) -> list[Weight]:
    path = folder / kind
    if not (path.exists() or path.with_suffix(".gguf").exists()):
        FORMATS[kind](make_llama(seed=2, hidden_size=256, intermediate_size=256), path)
    checkpoint = open_checkpoint(path if path.exists() else path.with_suffix(".gguf"))
    return [checkpoint.weight(name) for name in names]


def test_pieces_cover_every_row_once_from_multiples_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.model.weights.PIECE_WEIGHTS", 1000)
    assert list(row_pieces(70, 30, multiple=16)) == [(0, 32), (32, 64), (64, 70)]
    assert list(row_pieces(20, 4000, multiple=16)) == [(0, 16), (16, 20)]
    assert list(row_pieces(3, 1000)) == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("alternating", [False, True])
def test_the_compiled_passs_panels(
    kind: str, alternating: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = weights_of(kind, folder, GATE_UP)
    made = []
    for size in (SMALL, WHOLE):
        monkeypatch.setattr("engine.model.weights.PIECE_WEIGHTS", size)
        made.append(layout.pack(weights, zeros, alternating=alternating))
    assert made[0].kind == made[1].kind
    assert torch.equal(made[0].data, made[1].data)


@pytest.mark.parametrize("names", [QKV, GATE_UP])
@pytest.mark.parametrize("kind", WITH_CODES)
def test_the_int4_forms_of_torch_and_of_the_device(
    kind: str, names: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = weights_of(kind, folder, names)
    of_torch, of_device = [], []
    for size in (SMALL, WHOLE):
        monkeypatch.setattr("engine.model.weights.PIECE_WEIGHTS", size)
        of_torch.append(linear._int4_form(weights))
        of_device.append(kept_int4(NOTHING_KEPT, "", weights))
    for small, whole in zip(*of_torch, strict=True):
        np.testing.assert_array_equal(small, whole)
    small, whole = of_device
    assert torch.equal(small.words, whole.words)
    assert torch.equal(small.dequantize(), whole.dequantize())


@pytest.mark.parametrize("kind", FORMATS)
def test_the_dense_form(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = weights_of(kind, folder, QKV)
    made = []
    for size in (SMALL, WHOLE):
        monkeypatch.setattr("engine.model.weights.PIECE_WEIGHTS", size)
        made.append(linear._dense_form(weights, torch.bfloat16)[0])
    np.testing.assert_array_equal(*made)


@pytest.mark.parametrize("kind", WITH_CODES)
def test_rows_of_a_stack_come_from_the_weights_that_hold_them(kind: str, folder: Path) -> None:
    weights = weights_of(kind, folder, QKV)
    whole = np.concatenate([weight.int4().q for weight in weights])
    for start, stop in ((0, 512), (3, 9), (250, 262), (256, 384), (380, 512)):
        np.testing.assert_array_equal(stacked_int4(weights, start, stop).q, whole[start:stop])


@pytest.mark.parametrize("kind", FORMATS)
def test_single_rows_and_ranges_of_rows_are_those_of_the_whole(kind: str, folder: Path) -> None:
    (weight,) = weights_of(kind, folder, QKV[:1])
    whole = weight.decode()
    rows = np.array([13, 0, 63, 13])
    np.testing.assert_array_equal(weight.take(rows), whole[rows])
    np.testing.assert_array_equal(weight.decode(5, 27), whole[5:27])
