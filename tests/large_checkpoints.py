"""Checkpoints large enough that what loading takes shows: one random block, written many times.

path, nbytes = write_large("awq", tmp_path / "base", blocks=12)
"""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from engine.gguf import TENSOR_TYPES, GgufFile
from tests.checkpoint_formats import FORMATS
from tests.model_factories import make_llama, write_gguf_file

SHAPE = {
    "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 1,
    "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
"""11.7 million weights a block, 16.8 million in embedding and head."""


def write_large(kind: str, path: Path, blocks: int) -> tuple[Path, int]:
    """A Llama of `kind`, one of FORMATS, and the bytes of its weight files."""
    one = FORMATS[kind](make_llama(**SHAPE), path.with_name(f"{path.name}-one-block")).path
    if one.is_file():
        return _repeat_in_file(one, path.with_suffix(".gguf"), blocks)
    return _repeat_in_folder(one, path, blocks)


def _repeat_in_folder(one: Path, folder: Path, blocks: int) -> tuple[Path, int]:
    """A shard for each block, and one for what lies outside them."""
    folder.mkdir()
    config = json.loads((one / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": blocks}))
    tensors = load_file(one / "model.safetensors")
    edges = {name: tensors.pop(name) for name in list(tensors) if ".layers." not in name}
    if config.get("quantization_config"):  # its factory leaves them in fp32
        edges = {name: edge.to(torch.float16) for name, edge in edges.items()}
    save_file(edges, folder / "model-edges.safetensors")
    for block in range(blocks):
        named = {_of_block(name, block): tensor for name, tensor in tensors.items()}
        save_file(named, folder / f"model-{block:05d}.safetensors")
    return folder, sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _repeat_in_file(one: Path, file: Path, blocks: int) -> tuple[Path, int]:
    source = GgufFile(one)
    codes = {name: code for code, (name, _, _) in TENSOR_TYPES.items()}
    tensors = [
        (_of_block(tensor.name, block), tensor.shape, codes[tensor.type], tensor.data.tobytes())
        for tensor in source.tensors.values()
        for block in range(blocks if tensor.name.startswith("blk.") else 1)
    ]
    write_gguf_file(file, source.metadata | {"llama.block_count": blocks}, tensors)
    return file, file.stat().st_size


def _of_block(name: str, block: int) -> str:
    return re.sub(r"^(model\.layers|blk)\.0\.", rf"\g<1>.{block}.", name)
