"""Random e4m3 weights as a checkpoint has them, and rows to multiply."""

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels import fp8, reference
from tests.kernels.int4_cases import relative_error

SHAPES = [(0, 32, 64), (1, 48, 64), (5, 256, 128), (3, 30, 64)]  # rows, out, in; the last odd


def error_of_terms(
    rows: int, out: int, width: int, dtype: torch.dtype, *, by_output: bool, seed: int
) -> float:
    """The largest error of a number, of the sum of its products' magnitudes.

    The rows, one of them zeros, lie in a larger tensor that is NaN elsewhere.
    """
    bits, scale = _weights(np.random.default_rng(seed), out, width, by_output=by_output)
    generator = torch.Generator().manual_seed(seed)
    wide = torch.full((rows + 1, width + 3), torch.nan, dtype=dtype)
    wide[:rows, :width] = torch.randn(rows, width, generator=generator)
    wide[1:2, :width] = 0 if rows > 1 else torch.nan
    x, weight = wide[:rows, :width], fp8.pack(bits, scale)
    actual = fp8.linear(x, weight)
    assert (actual.dtype, actual.shape) == (dtype, (rows, out))
    expected = reference.fp8_linear(x, bits, scale, rounds=fp8.multiplies_fp8(weight))
    if not rows:
        return 0.0
    terms = x.double().abs() @ weight.dequantize().double().abs().T
    return float(((actual.double() - expected).abs() / terms.clamp_min(1e-30)).max())


def error(rows: int, out: int, width: int, dtype: torch.dtype, device: str = "cpu") -> float:
    generator = np.random.default_rng(rows)
    bits, scale = _weights(generator, out, width, by_output=rows % 2 == 1)
    x = torch.from_numpy(generator.normal(size=(rows, width))).to(dtype)
    if rows > 1:
        x[1] = 0
    weight = fp8.pack(bits, scale, device)
    actual = fp8.linear(x.to(device), weight)
    assert actual.dtype == dtype
    expected = reference.fp8_linear(x, bits, scale, rounds=fp8.multiplies_fp8(weight))
    return relative_error(actual, expected.float())


def _weights(
    generator: np.random.Generator, out: int, width: int, *, by_output: bool
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """Bits [out, width] without a NaN among them, and a scale for each output or one for all."""
    bits = generator.integers(0, 255, (out, width), dtype=np.uint8)
    bits[(bits & 127) == 127] = 0
    return bits, generator.uniform(0.5, 2, (out if by_output else 1, 1)).astype(np.float32)
