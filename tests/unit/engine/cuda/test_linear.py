"""A linear on the device keeps the form of its weights, where all of them have it."""

import numpy as np
import pytest
import torch

from engine.cuda.linear import INVARIANT_ROWS, DeviceLinear, Head, Precision, in_pieces
from engine.cuda.upload import Upload
from engine.kernels.int4 import TorchInt4
from engine.model.weights import BlockWeight, Fp8Weight, GroupedWeight, Weight
from tests.fake_device import FakeDevice

X = torch.randn(5, 128, generator=torch.Generator().manual_seed(0)).bfloat16()


def int4_weight(rows: int, seed: int) -> Weight:
    generator = np.random.default_rng(seed)
    scale = generator.uniform(0.01, 0.02, (rows, 4)).astype(np.float32)
    zero = generator.integers(5, 11, (rows, 4)).astype(np.float32)
    return GroupedWeight(generator.integers(0, 16, (rows, 128), np.uint8), scale, zero, None)


def fp8_weight(rows: int, seed: int) -> Weight:
    bits = np.random.default_rng(seed).integers(0, 120, (rows, 128), dtype=np.uint8)
    return Fp8Weight(bits, np.full((1, 1), 0.01, np.float32))


def plain_weight(rows: int, seed: int) -> Weight:
    values = np.random.default_rng(seed).standard_normal((rows, 128), np.float32)
    return BlockWeight("F32", values.view(np.uint8), (rows, 128))


def linear(
    weights: list[Weight], path: str = "auto", bias: torch.Tensor | None = None, *,
    batch_invariant: bool = False,
) -> DeviceLinear:  # fmt: skip
    precision = Precision(path, batch_invariant)  # type: ignore[arg-type]
    return DeviceLinear(weights, precision, TorchInt4(), Upload(FakeDevice(), 1 << 12), bias)


def expected(weights: list[Weight]) -> torch.Tensor:
    return X.float() @ torch.from_numpy(np.concatenate([w.decode() for w in weights])).T


@pytest.mark.parametrize(
    ("make", "form"), [(int4_weight, "int4"), (fp8_weight, "fp8"), (plain_weight, "dense")]
)
def test_weights_of_one_form_are_stacked_in_it(make, form: str) -> None:
    weights = [make(48, 1), make(16, 2)]
    own = linear(weights)
    assert [name for name in ("int4", "fp8", "dense") if getattr(own, name) is not None] == [form]
    y, want = own(X), expected(weights)
    assert (y.dtype, y.shape) == (torch.bfloat16, (5, 64))
    assert (y.float() - want).abs().max() < 0.06 * want.abs().max()


def test_weights_of_different_forms_become_plain() -> None:
    weights = [int4_weight(16, 1), plain_weight(16, 2)]
    own = linear(weights)
    assert own.dense is not None
    assert (own(X).float() - expected(weights)).abs().max() < 0.02 * expected(weights).abs().max()


@pytest.mark.parametrize(
    ("path", "int4", "fp8"),
    [("auto", True, True), ("int4", True, False), ("dense", False, False), ("fp32", False, False)],
)
def test_the_path_says_which_codes_are_kept(path: str, int4: bool, fp8: bool) -> None:
    assert (linear([int4_weight(16, 1)], path).int4 is not None) == int4
    assert (linear([fp8_weight(16, 1)], path).fp8 is not None) == fp8


def test_the_exact_path_is_exact() -> None:
    weights = [int4_weight(16, 1)]
    own = linear(weights, "fp32")
    torch.testing.assert_close(own(X.float()), expected(weights), atol=1e-4, rtol=0)


def test_a_bias_is_added_to_every_row() -> None:
    weights = [plain_weight(16, 1)]
    bias = torch.arange(16.0)
    added = linear(weights, "fp32", bias)(X.float()) - linear(weights, "fp32")(X.float())
    torch.testing.assert_close(added, bias.expand(5, 16), atol=1e-4, rtol=0)


def test_batch_invariant_products_have_one_shape_and_no_fp8() -> None:
    shapes = []

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        return x @ weight.T

    weight = torch.randn(8, 128)
    for rows in (1, INVARIANT_ROWS, INVARIANT_ROWS + 1):
        x = torch.randn(rows, 128)
        torch.testing.assert_close(in_pieces(product, x, weight), x @ weight.T)
    assert set(shapes) == {(INVARIANT_ROWS, 128)}
    assert len(shapes) == 1 + 1 + 2
    own = linear([fp8_weight(16, 1)], batch_invariant=True)
    assert own.fp8 is None
    assert own(X).shape == (5, 16)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_logits_are_not_rounded_to_the_weights_type(batch_invariant: bool) -> None:
    weight = torch.randn(40, 128).bfloat16()
    logits = Head(weight, batch_invariant=batch_invariant)(X)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, X.float() @ weight.float().T, atol=1e-3, rtol=0)
