"""The served base model as a transformers model in fp32, for training and for comparison with PEFT.

The weights are those that the engine serves (4-bit codes decoded to fp32), so an adapter is trained
against exactly the model that it will run on.
"""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.model.loader import Checkpoint, open_checkpoint


def load_base_model(path: Path) -> LlamaForCausalLM:
    """A LlamaForCausalLM in eval mode from a GGUF file or a checkpoint folder (Llama family)."""
    checkpoint = open_checkpoint(path)
    model = LlamaForCausalLM(_llama_config(checkpoint))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name == "lm_head.weight" and checkpoint.config.tied_head:
                continue
            parameter.copy_(torch.from_numpy(checkpoint.weight(name).decode()))
    return model.eval()


def _llama_config(checkpoint: Checkpoint) -> LlamaConfig:
    config = checkpoint.config
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        max_position_embeddings=config.context_length,
        tie_word_embeddings=config.tied_head,
        eos_token_id=list(config.eos_token_ids),
        bos_token_id=None,
        pad_token_id=None,
    )
