"""Every weight format against the writer's own arithmetic."""

import numpy as np
import pytest

from engine.model.config import CheckpointRefused
from engine.model.quantization import decode, int4_codes
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


def test_a_format_that_is_not_decoded_is_named() -> None:
    with pytest.raises(CheckpointRefused, match="Q6_K"):
        decode("Q6_K", np.zeros((1, 210), np.uint8), 256)
