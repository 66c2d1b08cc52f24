"""Rounding to 4 bits in groups."""

import numpy as np
import pytest
import torch

from engine.model.config import CheckpointRefused
from engine.model.rounding import ScaleType, round_groups, stored_scales

WEIGHT = np.random.default_rng(0).standard_normal((6, 256), dtype=np.float32)
DTYPES: dict[ScaleType, torch.dtype] = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_no_weight_moves_further_than_a_step(kind: ScaleType, symmetric: bool, group: int) -> None:
    rounded = round_groups(WEIGHT, group, kind, symmetric=symmetric)
    assert rounded.scale.shape == rounded.zero.shape == (6, 256 // group)
    step = np.repeat(rounded.scale, group, axis=1)
    moved = np.abs(rounded.values() - WEIGHT) / step
    assert moved.max() < (0.6 if symmetric else 1.1)
    assert np.median(moved) < 0.3


def test_a_larger_group_is_less_exact() -> None:
    errors = [
        np.linalg.norm(round_groups(WEIGHT, group, "F32", symmetric=False).values() - WEIGHT)
        for group in (32, 64, 128)
    ]
    assert errors == sorted(errors)


@pytest.mark.parametrize("kind", DTYPES)
def test_scales_are_numbers_of_the_type_that_stores_them(kind: ScaleType) -> None:
    rounded = round_groups(WEIGHT, 32, kind, symmetric=False)
    stored = torch.from_numpy(stored_scales(rounded.scale, kind).copy()).view(DTYPES[kind])
    np.testing.assert_array_equal(stored.float().numpy().reshape(6, 8), rounded.scale)


@pytest.mark.parametrize("symmetric", [False, True])
def test_zeros_stay_zero(symmetric: bool) -> None:
    weight = WEIGHT.copy()
    weight[:, ::3] = 0
    weight[2] = 0
    values = round_groups(weight, 32, "BF16", symmetric=symmetric).values()
    assert not values[:, ::3].any()
    assert not values[2].any()


@pytest.mark.parametrize("sign", [1, -1])
def test_weights_of_one_sign_use_all_codes(sign: int) -> None:
    weight = sign * np.linspace(0.01, 1, 32, dtype=np.float32).reshape(1, 32)
    assert set(round_groups(weight, 32, "F32", symmetric=False).q[0]) == set(range(16))


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_what_is_not_finite_is_refused(number: float) -> None:
    weight = WEIGHT.copy()
    weight[3, 7] = number
    with pytest.raises(CheckpointRefused, match="not a finite number"):
        round_groups(weight, 32, "F32", symmetric=False)
