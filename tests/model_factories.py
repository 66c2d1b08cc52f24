"""Tiny random base models and adapters, written to disk as their own tools write them.

model = make_llama(seed=1)                     # transformers' own, fp32
save_folder(model, tmp_path / "base")          # a Hugging Face folder
served = write_gguf(model, tmp_path / "base.gguf", "Q4_1")   # and what its codes stand for
make_adapter(model, tmp_path / "a", seed=3, r=8, target_modules=["q_proj"])    # by PEFT
"""

import contextlib
import copy
import struct
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from engine.adapters.blob import build_blob
from engine.adapters.config import check_config
from engine.adapters.plan import plan_adapter
from engine.adapters.safetensors_header import read_header
from engine.types import LAYER_TARGETS, AdapterBlob, ModelDescription
from tests.k_quants import K_TYPES, quantize_k

ALL_TARGETS = list(LAYER_TARGETS)


# --------------------------------------------------------------------------- base models


def make_llama(*, seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A random Llama, see `make_model`."""
    return make_model(LlamaForCausalLM, LlamaConfig, seed=seed, **changes)


def make_model(kind: Any, config: Any, *, seed: int = 0, **changes: Any) -> Any:
    """A random model with grouped queries whose logits spread over a few units.

    `kind` and `config`: transformers' classes of the architecture.
    """
    shape: dict[str, Any] = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "eos_token_id": 2, "bos_token_id": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    torch.manual_seed(seed)
    model = kind(config(**{**shape, **changes})).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                weight.normal_(std=0.3)
            else:
                weight.normal_(std=1.3 / weight.shape[1] ** 0.5)
    return model


def save_folder(model: LlamaForCausalLM, folder: Path, *, shard: str = "5GB") -> Path:
    """A Hugging Face checkpoint folder (no tokenizer)."""
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


# --------------------------------------------------------------------------- adapters


def make_adapter(
    model: LlamaForCausalLM, folder: Path, *, seed: int, strength: float = 0.5, **config: Any
) -> Path:
    """An adapter folder as PEFT saves it, with random A and B of a visible effect."""
    torch.manual_seed(seed)
    with _quiet():
        peft = get_peft_model(copy.deepcopy(model), LoraConfig(task_type="CAUSAL_LM", **config))
    with torch.no_grad():
        for name, weight in peft.named_parameters():
            if "lora_" in name:
                weight.normal_(std=strength / max(weight.shape) ** 0.5)
    with _quiet():
        peft.save_pretrained(folder, save_embedding_layers=False)
    return folder


def with_adapter(model: LlamaForCausalLM, folder: Path) -> PeftModel:
    """The oracle: PEFT's own model with the saved adapter, on a copy of the base."""
    with _quiet():
        return PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """PEFT calls what transformers has deprecated, and advises on tied heads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def read_blob(folder: Path, description: ModelDescription) -> AdapterBlob:
    """The adapter as the engine's own loader reads it."""
    config = check_config((folder / "adapter_config.json").read_bytes(), description.max_rank)
    assert config.config is not None, config.findings
    weights = folder / "adapter_model.safetensors"
    plan = plan_adapter(config.config, read_header(weights), description)
    return build_blob(weights, plan, description.adapter_dtype)


# --------------------------------------------------------------------------- GGUF


@dataclass(frozen=True)
class GgufType:
    code: int
    block: int
    block_bytes: int


GGUF_TYPES = {
    "F32": GgufType(0, 1, 4),
    "F16": GgufType(1, 1, 2),
    "Q4_0": GgufType(2, 32, 18),
    "Q4_1": GgufType(3, 32, 20),
    "Q8_0": GgufType(8, 32, 34),
    "BF16": GgufType(30, 1, 2),
}
K_GGUF_TYPES = {
    "Q4_K": GgufType(12, 256, 144),
    "Q5_K": GgufType(13, 256, 176),
    "Q6_K": GgufType(14, 256, 210),
}
"""Those that want rows of a multiple of 256."""
_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip
_EDGE_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
}  # fmt: skip


def quantize(weight: np.ndarray, kind: str) -> tuple[bytes, np.ndarray]:
    """`weight` fp32 [out, in] in a GGUF format, and the fp32 weight that its codes stand for."""
    if kind == "F32":
        return weight.astype("<f4").tobytes(), weight
    if kind in K_TYPES:
        return quantize_k(weight, kind)
    if kind == "F16":
        half = weight.astype("<f2")
        return half.tobytes(), half.astype(np.float32)
    if kind == "BF16":
        bits = (weight.astype("<f4").view("<u4") >> 16).astype("<u2")
        return bits.tobytes(), (bits.astype("<u4") << 16).view(np.float32)
    blocks = weight.reshape(-1, 32)
    if kind == "Q8_0":
        d = (np.abs(blocks).max(1, keepdims=True) / 127).astype("<f2")
        q = np.round(blocks / d.astype(np.float32)).clip(-127, 127).astype(np.int8)
        raw = np.concatenate((d.view(np.uint8), q.view(np.uint8)), axis=1)
        return raw.tobytes(), (q * d.astype(np.float32)).reshape(weight.shape)
    if kind == "Q4_0":
        d = (np.abs(blocks).max(1, keepdims=True) / 7).astype("<f2")
        q = np.round(blocks / d.astype(np.float32) + 8).clip(0, 15).astype(np.uint8)
        head, values = d.view(np.uint8), (q.astype(np.float32) - 8) * d.astype(np.float32)
    else:
        low = blocks.min(1, keepdims=True).astype("<f2")
        d = ((blocks.max(1, keepdims=True) - low.astype(np.float32)) / 15).astype("<f2")
        q = np.round((blocks - low.astype(np.float32)) / d.astype(np.float32)).clip(0, 15)
        q = q.astype(np.uint8)
        head = np.concatenate((d.view(np.uint8), low.view(np.uint8)), axis=1)
        values = q * d.astype(np.float32) + low.astype(np.float32)
    packed = q[:, :16] | (q[:, 16:] << 4)
    return np.concatenate((head, packed), axis=1).tobytes(), values.reshape(weight.shape)


def gguf_family(model: Any) -> str:
    """llama.cpp's name of the architecture: Mistral is a Llama with a window."""
    kind: str = model.config.model_type
    return "llama" if kind == "mistral" else kind


def _type_of(weight: np.ndarray, wanted: str) -> str:
    if weight.ndim == 1:
        return "F32"
    if wanted in K_TYPES and weight.shape[-1] % K_GGUF_TYPES[wanted].block:
        return "Q8_0"
    return wanted


def write_gguf(
    model: LlamaForCausalLM,
    file: Path,
    kind: str,
    *,
    edges: str = "Q8_0",
    rope_divisors: Sequence[float] = (),
    **metadata: Any,
) -> LlamaForCausalLM:
    """Writes a GGUF whose linears are of type `kind` and whose embedding is of type `edges`.

    As llama.cpp's own tool does it, rows that are no multiple of a K format's block are Q8_0.
    Returns the model with the weights that the file's codes stand for: the oracle for the file.
    """
    config, served, tensors = model.config, copy.deepcopy(model), []
    family = gguf_family(model)
    for name, parameter in served.named_parameters():
        weight, (module, _, ending) = parameter.detach().numpy(), name.rpartition(".")
        if module in _EDGE_NAMES:
            stored, wanted = _EDGE_NAMES[module], edges
        else:
            _, _, layer, part = module.split(".", 3)
            stored, wanted = f"blk.{layer}.{_LAYER_NAMES[part]}", kind
        wanted = _type_of(weight, wanted)
        data, values = quantize(weight, wanted)
        parameter.data = torch.from_numpy(values.copy())
        if family == "llama" and module.endswith(
            ("q_proj", "k_proj")
        ):  # the format pairs neighbours for rotation
            rows = np.frombuffer(data, np.uint8).reshape(weight.shape[0], -1)
            half = config.head_dim // 2
            pairs = rows.reshape(-1, 2, half, rows.shape[1]).swapaxes(1, 2)
            data = pairs.tobytes()
        tensors.append(
            (f"{stored}.{ending}", weight.shape, (GGUF_TYPES | K_GGUF_TYPES)[wanted].code, data)
        )
    if rope_divisors:
        divisors = struct.pack(f"<{len(rope_divisors)}f", *rope_divisors)
        tensors.append(("rope_freqs.weight", (len(rope_divisors),), 0, divisors))
    known: dict[str, Any] = {
        "general.architecture": family,
        f"{family}.block_count": config.num_hidden_layers,
        f"{family}.context_length": config.max_position_embeddings,
        f"{family}.embedding_length": config.hidden_size,
        f"{family}.feed_forward_length": config.intermediate_size,
        f"{family}.attention.head_count": config.num_attention_heads,
        f"{family}.attention.head_count_kv": config.num_key_value_heads,
        f"{family}.attention.key_length": getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
        f"{family}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{family}.rope.freq_base": config.rope_parameters["rope_theta"],
        f"{family}.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"t{index}" for index in range(config.vocab_size)],
        "tokenizer.ggml.eos_token_id": 2,
    }
    if getattr(config, "sliding_window", None):
        known[f"{family}.attention.sliding_window"] = config.sliding_window
    write_gguf_file(file, {**known, **metadata}, tensors)
    return served


def write_gguf_file(
    file: Path,
    metadata: dict[str, Any],
    tensors: Sequence[tuple[str, tuple[int, ...], int, bytes]],
    *,
    alignment: int = 32,
) -> None:
    """Any metadata and tensors (name, row-major shape, type code, bytes), well-formed or not."""
    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        out += _text(key) + _value(value)
    offset = 0
    for name, shape, code, data in tensors:
        out += _text(name) + struct.pack("<I", len(shape))
        out += struct.pack(f"<{len(shape)}Q", *reversed(shape)) + struct.pack("<IQ", code, offset)
        offset += -(-len(data) // alignment) * alignment
    for _, _, _, data in tensors:
        out += bytes(-len(out) % alignment) + data
    file.write_bytes(bytes(out))


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    assert isinstance(value, list)
    return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
