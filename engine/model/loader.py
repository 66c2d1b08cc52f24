"""Opens a base model: a GGUF file or a Hugging Face safetensors folder, one interface for both.

Weights come under their Hugging Face names ("model.layers.3.self_attn.q_proj.weight") and in its
layout, so that PEFT adapters apply to either.
"""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.gguf import GgufFile, metadata_tokenizer_digest, tokenizer_digest
from engine.mapped_file import MappedFile
from engine.model.config import (
    CheckpointRefused,
    ModelConfig,
    config_from_folder,
    config_from_gguf,
    read_json,
)
from engine.model.packed import StoredTensor, packing_of
from engine.model.quantization import Floats, row_bytes
from engine.model.weights import BlockWeight, Weight

_GGUF_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_GGUF_EDGE_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_QUANTIZATION_SUFFIX = re.compile(r"[.\-_](i?q\d\w*|bf16|f16|f32|fp16|fp32)$", re.IGNORECASE)
_SAFETENSORS_TYPES = ("F32", "F16", "BF16")


class Checkpoint(ABC):
    """Weights by Hugging Face name, and what identifies them."""

    name: str
    config: ModelConfig

    @abstractmethod
    def weight(self, name: str) -> Weight:
        """Raises CheckpointRefused when the checkpoint lacks it or its shape is not `config`'s."""

    def rope_divisors(self) -> Floats | None:
        """fp32 [head_dim / 2], what rotary frequencies are divided by where the file lists it."""
        return None

    @abstractmethod
    def release(self) -> None:
        """Gives back the memory of what was read; weights stay usable, and are read again."""

    @abstractmethod
    def files(self) -> list[Path]:
        """What identifies the weights, in a stable order."""

    @abstractmethod
    def tokenizer_digest(self) -> str:
        """See engine.gguf.tokenizer_digest."""


def open_checkpoint(path: Path) -> Checkpoint:
    """A GGUF file or a folder with config.json and *.safetensors."""
    if path.is_dir():
        return FolderCheckpoint(path)
    if path.is_file():
        return GgufCheckpoint(path)
    raise CheckpointRefused(f"no base model at {path}: a GGUF file or a checkpoint folder is due")


class GgufCheckpoint(Checkpoint):
    """A llama.cpp file. Llama's q and k rows are stored for interleaved rotary pairs."""

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        self.name = _QUANTIZATION_SUFFIX.sub("", path.stem)
        self.config = config_from_gguf(
            self._file.metadata, tied_head="output.weight" not in self._file.tensors
        )
        self._interleaved = self.config.architecture == "llama"

    def weight(self, name: str) -> Weight:
        stored = _gguf_name(name)
        tensor = self._file.tensors.get(stored)
        if tensor is None:
            raise CheckpointRefused(f"{self._file.path.name} has no tensor {stored} for {name}")
        rows = tensor.data.reshape(-1, row_bytes(tensor.type, tensor.shape[-1]))
        if self._interleaved and name.endswith(("q_proj.weight", "k_proj.weight")):
            rows = rows[_half_rotation_order(tensor.shape[0], self.config.head_dim)]
        _check_shape(name, tensor.shape, self.config)
        return BlockWeight(tensor.type, rows, tensor.shape)

    def rope_divisors(self) -> Floats | None:
        """llama3's scaling, which a GGUF file lists frequency by frequency."""
        tensor = self._file.tensors.get("rope_freqs.weight")
        if tensor is None:
            return None
        if tensor.type != "F32" or tensor.shape != (self.config.head_dim // 2,):
            raise CheckpointRefused("rope_freqs.weight is not one F32 number for each frequency")
        return tensor.data.view(np.float32).copy()

    def release(self) -> None:
        self._file.release()

    def files(self) -> list[Path]:
        return [self._file.path]

    def tokenizer_digest(self) -> str:
        return metadata_tokenizer_digest(self._file.metadata)


class FolderCheckpoint(Checkpoint):
    """A Hugging Face folder, sharded or not. Bytes are mapped, never unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.name = folder.name
        self.config = config_from_folder(folder)
        self._shards = sorted(folder.glob("*.safetensors"))
        if not self._shards:
            raise CheckpointRefused(f"{folder.name} has no *.safetensors file")
        self._packing = packing_of(read_json(folder / "config.json"))
        self._tensors: dict[str, StoredTensor] = {}
        self._mapped: list[MappedFile] = []
        for shard in self._shards:
            self._read_shard(shard)

    def _read_shard(self, shard: Path) -> None:
        try:
            mapped = MappedFile(shard)
        except (OSError, ValueError) as error:
            raise CheckpointRefused(f"cannot read {shard.name}: {error}") from error
        self._mapped.append(mapped)
        raw = mapped.bytes
        header_bytes = int.from_bytes(raw[:8].tobytes(), "little")
        if header_bytes > raw.size - 8:
            raise CheckpointRefused(f"{shard.name} is truncated")
        data = raw[8 + header_bytes :]
        try:
            header = json.loads(raw[8 : 8 + header_bytes].tobytes())
            header.pop("__metadata__", None)
            for name, info in header.items():
                start, stop = info["data_offsets"]
                if not 0 <= start <= stop <= data.size:
                    raise CheckpointRefused(f"{name} lies outside {shard.name}")
                shape = tuple(info["shape"])
                self._tensors[name] = StoredTensor(info["dtype"], shape, data[start:stop])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointRefused(f"{shard.name} has a malformed header") from error

    def weight(self, name: str) -> Weight:
        if self._packing is not None and name.endswith(".weight"):
            packed = self._packing.weight(name.removesuffix(".weight"), self._tensors.get)
            if packed is not None:
                _check_shape(name, packed.shape, self.config)
                return packed
        stored = self._tensors.get(name)
        if stored is None:
            raise CheckpointRefused(f"{self._folder.name} has no tensor {name}")
        if stored.dtype not in _SAFETENSORS_TYPES:
            raise CheckpointRefused(
                f"{name} is {stored.dtype}: only F32, F16 and BF16 are supported without a "
                "quantization_config"
            )
        _check_shape(name, stored.shape, self.config)
        rows = stored.data.reshape(stored.shape[0] if len(stored.shape) == 2 else 1, -1)
        return BlockWeight(stored.dtype, rows, stored.shape)

    def release(self) -> None:
        for file in self._mapped:
            file.release()

    def files(self) -> list[Path]:
        return [self._folder / "config.json", *self._shards]

    def tokenizer_digest(self) -> str:
        if not (self._folder / "tokenizer.json").is_file():
            return hashlib.sha256(b"no tokenizer").hexdigest()
        return tokenizer_digest(self._folder)


def module_shape(config: ModelConfig, target: str) -> tuple[int, int]:
    """(out, in) of the weight that an adapter target names."""
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        "q_proj": (config.q_width, hidden),
        "k_proj": (config.kv_width, hidden),
        "v_proj": (config.kv_width, hidden),
        "o_proj": (hidden, config.q_width),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
        "embed_tokens": (config.vocab_size, hidden),
        "lm_head": (config.vocab_size, hidden),
    }[target]


def expected_shape(name: str, config: ModelConfig) -> tuple[int, ...]:
    """The shape of a tensor, by its full name."""
    target = name.split(".")[-2]
    if target in ("q_norm", "k_norm"):
        return (config.head_dim,)
    if target.endswith("norm"):
        return (config.hidden_size,)
    shape = module_shape(config, target)
    return shape[:1] if name.endswith(".bias") else shape


def _check_shape(name: str, shape: tuple[int, ...], config: ModelConfig) -> None:
    due = expected_shape(name, config)
    if shape != due:
        raise CheckpointRefused(f"{name} has shape {list(shape)}; its config asks for {list(due)}")


def _gguf_name(name: str) -> str:
    if name in _GGUF_EDGE_NAMES:
        return _GGUF_EDGE_NAMES[name]
    _, _, layer, module = name.split(".", 3)
    module, _, part = module.rpartition(".")
    return f"blk.{layer}.{_GGUF_LAYER_NAMES[module]}.{part}"


def _half_rotation_order(rows: int, head_dim: int) -> npt.NDArray[np.int64]:
    """For every row of the Hugging Face layout, its row in the file.

    llama.cpp rotates neighbouring pairs (2i, 2i+1) of a head, Hugging Face (i, i + head_dim / 2).
    """
    order = np.arange(rows).reshape(-1, head_dim // 2, 2)
    return order.transpose(0, 2, 1).reshape(-1)
