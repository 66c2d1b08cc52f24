"""Every weight format against the writer's own arithmetic."""

import gguf
import numpy as np
import pytest
import torch

from engine.model.config import CheckpointRefused
from engine.model.quantization import decode, decode_fp8, int4_codes
from tests.k_quants import K_TYPES
from tests.model_factories import GGUF_TYPES, quantize

WEIGHT = np.random.default_rng(0).standard_normal((6, 96), dtype=np.float32)


@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_decodes_to_what_the_codes_stand_for(kind: str) -> None:
    data, values = quantize(WEIGHT, kind)
    rows = np.frombuffer(data, np.uint8).reshape(6, -1)
    np.testing.assert_allclose(decode(kind, rows, 96), values, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_int4_codes_are_the_files_own(kind: str) -> None:
    data, values = quantize(WEIGHT, kind)
    codes = int4_codes(kind, np.frombuffer(data, np.uint8).reshape(6, -1), 96)
    assert codes.q.shape == (6, 96)
    assert codes.scale.shape == codes.zero.shape == (6, 3)
    weights = codes.scale[..., None] * (codes.q.reshape(6, 3, 32) - 8.0) + codes.zero[..., None]
    np.testing.assert_allclose(weights.reshape(6, 96), values, atol=1e-6, rtol=0)


def k_rows(kind: str, rows: int = 5, blocks: int = 3) -> np.ndarray:
    """Random super-blocks whose scales are ordinary numbers: uint8 [rows, row_bytes]."""
    random = np.random.default_rng(1)
    block_bytes = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}[kind]
    raw = random.integers(0, 256, (rows, blocks, block_bytes), dtype=np.uint8)
    scales = random.uniform(-0.1, 0.1, (rows, blocks, 2)).astype("<f2").view(np.uint8)
    if kind == "Q6_K":
        raw[..., 208:] = scales[..., :2]
    else:
        raw[..., :4] = scales
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", K_TYPES)
def test_k_formats_hold_what_was_rounded(kind: str) -> None:
    weight = np.random.default_rng(3).standard_normal((6, 512), dtype=np.float32)
    data, values = quantize(weight, kind)
    rows = np.frombuffer(data, np.uint8).reshape(6, -1)
    np.testing.assert_allclose(decode(kind, rows, 512), values, atol=1e-5, rtol=0)
    error = np.linalg.norm(values - weight) / np.linalg.norm(weight)
    assert error < {"Q4_K": 0.1, "Q5_K": 0.05, "Q6_K": 0.025}[kind]


@pytest.mark.parametrize("kind", K_TYPES)
def test_k_formats_decode_as_ggufs_own_package_does(kind: str) -> None:
    rows = k_rows(kind)
    want = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
    np.testing.assert_allclose(decode(kind, rows, 768), want, atol=2e-5, rtol=0)


def test_q4_k_keeps_its_codes() -> None:
    rows = k_rows("Q4_K")
    codes = int4_codes("Q4_K", rows, 768)
    weights = codes.scale[..., None] * (codes.q.reshape(5, 24, 32) - 8.0) + codes.zero[..., None]
    want = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType.Q4_K)
    np.testing.assert_allclose(weights.reshape(5, 768), want, atol=1e-4, rtol=0)


def test_fp8_numbers_are_torchs() -> None:
    bits = np.arange(256, dtype=np.uint8)
    want = torch.from_numpy(bits).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(decode_fp8(bits), want)


def test_a_format_that_is_not_decoded_is_named() -> None:
    with pytest.raises(CheckpointRefused, match="Q2_K"):
        decode("Q2_K", np.zeros((1, 84), np.uint8), 256)
