"""AWQ, GPTQ and fp8 folders: written here as their tools do, read by the loader."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine.model.config import CheckpointRefused
from engine.model.loader import open_checkpoint
from engine.model.packed import packing_of
from tests.model_factories import make_llama, save_folder
from tests.parity.driver import Driver, Piece, reference_logits

GROUP = 32
PROMPT = [(7 * index * index + 3 * index + 5) % 96 for index in range(40)]
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "strategy": "channel"}}},
}


def grouped(weight: torch.Tensor, order: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Codes [out, in], scales and zeros [out, groups], and the weight that they stand for.

    `order`: [in], each column's group.
    """
    q, out = torch.zeros_like(weight), torch.zeros_like(weight)
    scales, zeros = [], []
    for group in range(int(order.max()) + 1):
        part = weight[:, order == group]
        low, high = part.min(1, keepdim=True).values, part.max(1, keepdim=True).values
        scale = ((high - low) / 15).half().float()
        zero = (-low / scale).round().clamp(1, 15)
        codes = (part / scale + zero).round().clamp(0, 15)
        q[:, order == group], out[:, order == group] = codes, (codes - zero) * scale
        scales.append(scale)
        zeros.append(zero)
    return q, torch.cat(scales, 1), torch.cat(zeros, 1), out


def packed(codes: torch.Tensor, order: list[int]) -> torch.Tensor:
    """[n, m] codes -> int32 [n, m / 8]; nibble i of a word is column order[i] of its eight."""
    eights = codes.numpy().astype(np.uint32).reshape(codes.shape[0], -1, 8)[..., order]
    words = (eights << np.arange(0, 32, 4, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    return torch.from_numpy(words.view(np.int32).copy())


def awq(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    q, scale, zero, served = grouped(weight, torch.arange(weight.shape[1]) // GROUP)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    tensors = {
        "qweight": packed(q.T, order),
        "qzeros": packed(zero.T, order),
        "scales": scale.T.half().contiguous(),
    }
    return tensors, served


def gptq(
    weight: torch.Tensor, *, act_order: bool = False, less: int = 1
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    order = torch.arange(weight.shape[1]) // GROUP
    if act_order:
        order = order[torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(3))]
    q, scale, zero, served = grouped(weight, order)
    in_order = list(range(8))
    tensors = {
        "qweight": packed(q, in_order).T.contiguous(),
        "qzeros": packed(zero.T - less, in_order),
        "scales": scale.T.half().contiguous(),
        "g_idx": order.int(),
    }
    return tensors, served


def fp8(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    bits = (weight / scale.float()).to(torch.float8_e4m3fn)
    return {"weight": bits, "weight_scale": scale}, bits.float() * scale.float()


def write(folder: Path, quantization: dict[str, Any], quantize: Any) -> Any:
    """A folder whose blocks' linears are quantized; returns the model that it stands for."""
    model = make_llama(seed=8)
    tensors = {}
    for name, parameter in model.named_parameters():
        module = name.removesuffix(".weight")
        if module.endswith("_proj"):
            parts, parameter.data = quantize(parameter.detach())
            tensors |= {f"{module}.{part}": value for part, value in parts.items()}
        else:
            tensors[name] = parameter.detach().clone()
    save_folder(model, folder)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return model


CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "awq": (AWQ, awq),
    "gptq": (GPTQ, gptq),
    "gptq with act-order": (
        GPTQ | {"desc_act": True},
        lambda weight: gptq(weight, act_order=True),
    ),
    "gptq, second format": (
        GPTQ | {"checkpoint_format": "gptq_v2"},
        lambda weight: gptq(weight, less=0),
    ),
    "compressed-tensors fp8": (FP8, fp8),
}


@pytest.mark.parametrize("case", CASES)
def test_a_folder_is_served_as_what_its_codes_stand_for(tmp_path: Path, case: str) -> None:
    model = write(tmp_path / "base", *CASES[case])
    driver = Driver(tmp_path / "base", tmp_path, linear_path="fp32")
    driver.feed(Piece(0, PROMPT[:30]))
    (got,) = driver.feed(Piece(0, PROMPT[30:]))
    torch.testing.assert_close(got, reference_logits(model, PROMPT)[-1], atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("case", CASES)
def test_codes_in_column_groups_are_kept_for_the_int4_kernel(tmp_path: Path, case: str) -> None:
    write(tmp_path, *CASES[case])
    name = "model.layers.1.mlp.down_proj.weight"
    weight = open_checkpoint(tmp_path).weight(name)
    codes = weight.int4()
    if case in ("gptq with act-order", "compressed-tensors fp8"):
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
            (FP8 | {"format": "pack-quantized"}, "pack-quantized"),
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

        write(tmp_path, AWQ, short_of_zeros)
        with pytest.raises(CheckpointRefused, match="do not fit together"):
            open_checkpoint(tmp_path).weight("model.layers.0.mlp.up_proj.weight")

    def test_a_missing_part(self, tmp_path: Path) -> None:
        def without_scales(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
            tensors, served = gptq(weight)
            return {name: part for name, part in tensors.items() if name != "scales"}, served

        write(tmp_path, GPTQ, without_scales)
        with pytest.raises(CheckpointRefused, match="has no scales"):
            open_checkpoint(tmp_path).weight("model.layers.0.mlp.up_proj.weight")

    def test_a_group_index_out_of_range(self, tmp_path: Path) -> None:
        def out_of_range(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
            tensors, served = gptq(weight, act_order=True)
            return tensors | {"g_idx": tensors["g_idx"] + 1}, served

        write(tmp_path, GPTQ, out_of_range)
        with pytest.raises(CheckpointRefused, match="g_idx"):
            open_checkpoint(tmp_path).weight("model.layers.0.mlp.up_proj.weight")
