"""AWQ, GPTQ and compressed-tensors folders, written as their tools do, read by the loader."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.model.config import CheckpointRefused
from engine.model.loader import open_checkpoint
from engine.model.packed import packing_of
from tests.checkpoint_formats import (
    AWQ,
    FP8,
    GPTQ,
    PACKED,
    awq,
    gptq,
    int4,
    int4_config,
    write_packed,
)
from tests.model_factories import make_llama
from tests.parity.driver import Driver, Piece, reference_logits

PROMPT = [(7 * index * index + 3 * index + 5) % 96 for index in range(40)]


@pytest.mark.parametrize("case", PACKED)
def test_a_folder_is_served_as_what_its_codes_stand_for(tmp_path: Path, case: str) -> None:
    model = write_packed(make_llama(seed=8), tmp_path / "base", *PACKED[case])
    driver = Driver(tmp_path / "base", tmp_path, linear_path="fp32")
    driver.feed(Piece(0, PROMPT[:30]))
    (got,) = driver.feed(Piece(0, PROMPT[30:]))
    torch.testing.assert_close(got, reference_logits(model, PROMPT)[-1], atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("case", PACKED)
def test_codes_in_column_groups_are_kept_for_the_int4_kernel(tmp_path: Path, case: str) -> None:
    write_packed(make_llama(seed=8), tmp_path, *PACKED[case])
    name = "model.layers.1.mlp.down_proj.weight"
    weight = open_checkpoint(tmp_path).weight(name)
    codes = weight.int4()
    if case == "gptq with act-order" or "fp8" in case:
        assert codes is None
        return
    assert codes is not None
    q = codes.q.reshape(weight.shape[0], -1, 32) - 8.0
    values = codes.scale[..., None] * q + codes.zero[..., None]
    np.testing.assert_allclose(values.reshape(weight.shape), weight.decode(), atol=1e-6)
    np.testing.assert_array_equal(weight.take(np.array([5, 2])), weight.decode()[[5, 2]])


class TestRefusals:
    @pytest.mark.parametrize(
        ("given", "named"),
        [
            ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
            (AWQ | {"bits": 3}, "3 bits"),
            (AWQ | {"version": "gemv"}, "gemv"),
            (FP8 | {"format": "int-quantized"}, "int-quantized"),
            (FP8 | {"format": "pack-quantized"}, "channel' with 8 bits"),
            (
                FP8 | {"config_groups": {"a": {"weights": {"num_bits": 8, "strategy": "block"}}}},
                "block",
            ),
        ],
    )
    def test_name_what_is_not_supported(self, given: dict[str, Any], named: str) -> None:
        with pytest.raises(CheckpointRefused, match=named):
            packing_of({"quantization_config": given})

    def test_parts_that_do_not_fit_together(self, tmp_path: Path) -> None:
        def short_of_zeros(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
            tensors, served = awq(weight)
            return tensors | {"qzeros": tensors["qzeros"][:-1].contiguous()}, served

        write_packed(make_llama(seed=8), tmp_path, AWQ, short_of_zeros)
        with pytest.raises(CheckpointRefused, match="do not fit together"):
            open_checkpoint(tmp_path).weight("model.layers.0.mlp.up_proj.weight")

    def test_a_missing_part(self, tmp_path: Path) -> None:
        def without_scales(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
            tensors, served = gptq(weight)
            return {name: part for name, part in tensors.items() if name != "scales"}, served

        write_packed(make_llama(seed=8), tmp_path, GPTQ, without_scales)
        with pytest.raises(CheckpointRefused, match="has no scales"):
            open_checkpoint(tmp_path).weight("model.layers.0.mlp.up_proj.weight")

    def test_a_group_index_out_of_range(self, tmp_path: Path) -> None:
        def out_of_range(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
            tensors, served = gptq(weight, act_order=True)
            return tensors | {"g_idx": tensors["g_idx"] + 1}, served

        write_packed(make_llama(seed=8), tmp_path, GPTQ, out_of_range)
        with pytest.raises(CheckpointRefused, match="g_idx"):
            open_checkpoint(tmp_path).weight("model.layers.0.mlp.up_proj.weight")

    @pytest.mark.parametrize(
        ("part", "change", "named"),
        [
            ("weight_shape", lambda shape: shape + 8, "not its weight_shape"),
            ("weight_zero_point", lambda zero: zero[:-1].contiguous(), "weight_zero_point has"),
            ("weight_scale", lambda scale: scale[:, :1].contiguous(), "weight_zero_point has"),
        ],
    )
    def test_a_part_of_another_shape(
        self, tmp_path: Path, part: str, change: Any, named: str
    ) -> None:
        def with_change(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
            tensors, served = int4(weight)
            return tensors | {part: change(tensors[part])}, served

        write_packed(make_llama(seed=8), tmp_path, int4_config(symmetric=False), with_change)
        with pytest.raises(CheckpointRefused, match=named):
            open_checkpoint(tmp_path).weight("model.layers.0.mlp.up_proj.weight")


def test_act_order_of_compressed_tensors_is_followed(tmp_path: Path) -> None:
    order = torch.randperm(64, generator=torch.Generator().manual_seed(5))

    def shuffled(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        if weight.shape[1] != 64:
            return int4(weight)
        tensors, served = int4(weight[:, order])  # columns of a group stand together ...
        back = order.argsort()  # ... and are stored in their own places, with their group's number
        codes, _ = int4(weight[:, order])
        nibbles = (codes["weight_packed"].unsqueeze(-1) >> torch.arange(0, 32, 4)) & 15
        plain = nibbles.reshape(weight.shape)[:, back]
        words = (plain.reshape(weight.shape[0], -1, 8).long() << torch.arange(0, 32, 4)).sum(-1)
        tensors["weight_packed"] = (words & 0xFFFFFFFF).to(torch.int64).to(torch.int32)
        tensors["weight_g_idx"] = (back // 32).int()
        return tensors, served[:, back]

    model = write_packed(make_llama(seed=8), tmp_path, int4_config(symmetric=False), shuffled)
    weight = open_checkpoint(tmp_path).weight("model.layers.0.mlp.up_proj.weight")
    assert weight.int4() is None
    want = model.model.layers[0].mlp.up_proj.weight.detach().numpy()
    np.testing.assert_allclose(weight.decode(), want, atol=1e-6)
