"""Tiny checkpoints in every format that is served, written as their own tools write them.

served = FORMATS["awq"](model, tmp_path / "base")   # a folder, or a file where the format is GGUF's
served.path, served.model                           # and the model that its codes stand for
"""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.model_factories import GGUF_TYPES, K_GGUF_TYPES, gguf_family, save_folder, write_gguf

GROUP = 32
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


def fp8_of_a_matrix(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    scale = (weight.abs().max() / 448).reshape(1)
    bits = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": bits, "weight_scale": scale}, bits.float() * scale


def int4(
    weight: torch.Tensor, *, symmetric: bool = False
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """compressed-tensors' pack-quantized."""
    q, scale, zero, served = grouped(weight, torch.arange(weight.shape[1]) // GROUP)
    if symmetric:
        scale = (weight.reshape(weight.shape[0], -1, GROUP).abs().amax(-1) / 7.5).bfloat16()
        steps = scale.float().repeat_interleave(GROUP, 1)
        q = (weight / steps + 8).round().clamp(0, 15)
        served = (q - 8) * steps
    in_order = list(range(8))
    tensors = {
        "weight_packed": packed(q, in_order),
        "weight_scale": scale.contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = packed(zero.T, in_order).T.contiguous()
    return tensors, served


def int4_config(*, symmetric: bool) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": weights | {"symmetric": symmetric}}},
    }


def write_packed(model: Any, folder: Path, quantization: dict[str, Any], quantize: Any) -> Any:
    """A folder whose blocks' linears are quantized; returns the model that it stands for."""
    model, tensors = copy.deepcopy(model), {}
    for name, parameter in model.named_parameters():
        module = name.removesuffix(".weight")
        if name.endswith("_proj.weight"):
            parts, parameter.data = quantize(parameter.detach())
            tensors |= {f"{module}.{part}": value for part, value in parts.items()}
        else:
            tensors[name] = parameter.detach().clone()
    save_folder(model, folder)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return model


def split_in_two(folder: Path) -> None:
    """Shards a folder's weights as transformers does, each part of a linear in another file."""
    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    where = {
        name: f"model-{1 + index % 2:05}-of-00002.safetensors"
        for index, name in enumerate(sorted(tensors))
    }
    for file in set(where.values()):
        save_file({name: tensors[name] for name in where if where[name] == file}, folder / file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    whole.unlink()


PACKED: dict[str, tuple[dict[str, Any], Any]] = {
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
    "compressed-tensors fp8, one scale": (
        FP8 | {"config_groups": {"group_0": {"weights": {"num_bits": 8, "strategy": "tensor"}}}},
        fp8_of_a_matrix,
    ),
    "compressed-tensors int4": (int4_config(symmetric=False), int4),
    "compressed-tensors int4, symmetric": (
        int4_config(symmetric=True),
        lambda weight: int4(weight, symmetric=True),
    ),
}
"""What `quantization_config` says, and how a linear is stored."""


@dataclass(frozen=True)
class Served:
    """A checkpoint on the disk, and the model that it stands for."""

    path: Path
    model: Any


def _packed(case: str) -> Callable[[Any, Path], Served]:
    def write(model: Any, path: Path) -> Served:
        return Served(path, write_packed(model, path, *PACKED[case]))

    return write


def _plain(dtype: torch.dtype) -> Callable[[Any, Path], Served]:
    def write(model: Any, path: Path) -> Served:
        served = copy.deepcopy(model)
        for parameter in served.parameters():
            parameter.data = parameter.data.to(dtype).float()
        save_folder(copy.deepcopy(model).to(dtype), path)
        return Served(path, served)

    return write


def _gguf(kind: str) -> Callable[[Any, Path], Served]:
    def write(model: Any, path: Path) -> Served:
        file = path.with_suffix(".gguf")
        divisors, metadata = rope_in_gguf(model)
        return Served(file, write_gguf(model, file, kind, rope_divisors=divisors, **metadata))

    return write


def rope_in_gguf(model: Any) -> tuple[list[float], dict[str, Any]]:
    """How a GGUF file tells of a model's rope scaling: divisors for llama3, else metadata."""
    config, rope = model.config, model.config.rope_parameters
    kind, family = rope["rope_type"], gguf_family(model)
    if kind == "default":
        return [], {}
    if kind == "llama3":
        width = model.model.rotary_emb.inv_freq.numel()
        turns = 1 / rope["rope_theta"] ** (torch.arange(width) / width)
        return (turns / model.model.rotary_emb.inv_freq).tolist(), {}
    original = rope.get("original_max_position_embeddings", config.max_position_embeddings)
    return [], {
        f"{family}.rope.scaling.type": kind,
        f"{family}.rope.scaling.factor": float(rope["factor"]),
        f"{family}.rope.scaling.original_context_length": original,
    }


FORMATS: dict[str, Callable[[Any, Path], Served]] = {
    "F32": _plain(torch.float32),
    "F16": _plain(torch.float16),
    "BF16": _plain(torch.bfloat16),
    **{case: _packed(case) for case in PACKED},
    **{f"GGUF {kind}": _gguf(kind) for kind in (*GGUF_TYPES, *K_GGUF_TYPES)},
}
