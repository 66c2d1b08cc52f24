"""The same model and the same adapters in the form that each peer reads."""

import itertools
from pathlib import Path

import gguf
import numpy as np
import torch
from peft import LoraConfig
from safetensors.numpy import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.peers_parts.workload import RANKS
from engine.model.config import ModelConfig, read_json
from engine.model.linear import bf16_is_fast
from engine.model.loader import Checkpoint, module_shape
from engine.tokenizer_files import read_tokenizer
from engine.types import LAYER_TARGETS

ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
STRENGTH = 0.05
"""Standard deviation of the adapters' random B: enough to change most answers."""


def base_in_transformers(checkpoint: Checkpoint) -> LlamaForCausalLM:
    """The checkpoint's dequantized weights in transformers' own model, in this CPU's best dtype."""
    c = checkpoint.config
    config = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, num_hidden_layers=c.layers,
        intermediate_size=c.intermediate_size, num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads, rms_norm_eps=c.norm_eps, head_dim=c.head_dim,
        max_position_embeddings=c.context_length, tie_word_embeddings=c.tied_head,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    names = [n for n in model.state_dict() if not (c.tied_head and n == "lm_head.weight")]
    weights = {name: torch.from_numpy(checkpoint.weight(name).decode()) for name in names}
    model.load_state_dict(weights, strict=not c.tied_head)
    return model.to(torch.bfloat16 if bf16_is_fast() else torch.float32)


def write_checkpoint(model: LlamaForCausalLM, base: Path, folder: Path) -> None:
    """The model as a Hugging Face folder, with the tokenizer and chat template of `base`."""
    model.save_pretrained(folder)
    files = read_tokenizer(base)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=files.tokenizer, chat_template=files.chat_template
    )
    tokenizer.save_pretrained(folder)


def write_adapters(base: ModelConfig, folder: Path) -> list[Path]:
    """Random adapters of the workload's ranks as PEFT saves them, fp32, on every layer."""
    rng = np.random.default_rng(0)
    paths = [folder / f"a{number}" for number in range(len(RANKS))]
    for rank, path in zip(RANKS, paths, strict=True):
        config = LoraConfig(
            r=rank, lora_alpha=rank, target_modules=list(LAYER_TARGETS), task_type="CAUSAL_LM"
        )
        config.save_pretrained(path)
        tensors = {}
        for layer, target in itertools.product(range(base.layers), LAYER_TARGETS):
            outputs, inputs = module_shape(base, target)
            part = "self_attn" if target in ATTENTION_TARGETS else "mlp"
            name = f"base_model.model.model.layers.{layer}.{part}.{target}"
            a = rng.uniform(-1, 1, (rank, inputs)) / inputs**0.5
            b = STRENGTH * rng.standard_normal((outputs, rank))
            tensors[f"{name}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = b.astype(np.float32)
        save_file(tensors, path / "adapter_model.safetensors")
    return paths


def write_gguf_adapter(adapter: Path, file: Path, base: ModelConfig) -> None:
    """An adapter of PEFT's as llama.cpp's LoRA file, in fp32.

    llama.cpp adds alpha / rank times B A to a weight of its own layout, in which the rows of a
    Llama's q and k stand in neighbouring rotary pairs (2i, 2i + 1) instead of (i, i + head / 2).
    Raises ValueError for what that formula does not say: rsLoRA, patterns, DoRA.
    """
    config = read_json(adapter / "adapter_config.json")
    unknown = [
        name for name in ("use_rslora", "rank_pattern", "alpha_pattern", "use_dora")
        if config.get(name)
    ]  # fmt: skip
    if unknown:
        raise ValueError(f"{adapter.name} has {', '.join(unknown)}: only plain LoRA is converted")
    writer = gguf.GGUFWriter(file, base.architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(config["lora_alpha"]))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, base.layers)
    for name, matrix in load_file(adapter / "adapter_model.safetensors").items():
        module, _, side = name.removesuffix(".weight").rpartition(".")
        module = module.removeprefix("base_model.model.")
        stored = names.get_name(module)
        if stored is None or side not in ("lora_A", "lora_B"):
            raise ValueError(f"{adapter.name} has {name}, which llama.cpp has no place for")
        matrix = matrix.astype(np.float32)
        if side == "lora_B" and module.endswith(("q_proj", "k_proj")):
            halves = matrix.reshape(-1, 2, base.head_dim // 2, matrix.shape[1])
            matrix = halves.swapaxes(1, 2).reshape(matrix.shape)
        writer.add_tensor(f"{stored}.weight.{side.lower()}", matrix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
