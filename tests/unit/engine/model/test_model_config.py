"""What a checkpoint may say about itself: read where it is supported, refused by name elsewhere."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.model.config import CheckpointRefused, config_from_folder, config_from_gguf

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
    "eos_token_id": 2,
}  # fmt: skip
GGUF: dict[str, Any] = {
    "general.architecture": "llama", "llama.block_count": 2, "llama.context_length": 512,
    "llama.embedding_length": 64, "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.vocab_size": 100,
    "tokenizer.ggml.eos_token_id": 2,
}  # fmt: skip


def read(folder: Path, generation: dict[str, Any] | None = None, **changes: Any):
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return config_from_folder(folder)


def test_a_folder_and_a_gguf_of_one_model_are_one_config(tmp_path: Path) -> None:
    assert read(tmp_path, tie_word_embeddings=True) == config_from_gguf(GGUF, tied_head=True)


def test_old_and_new_spellings_of_rope_are_the_same(tmp_path: Path) -> None:
    old = read(tmp_path, rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    new = read(
        tmp_path, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 500000}
    )
    assert old == new
    assert (new.rope_theta, new.rope_scaling.factor) == (5e5, 2.0)


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    assert read(tmp_path).eos_token_ids == (2,)
    assert read(tmp_path, {"eos_token_id": [7, 9, 7]}).eos_token_ids == (7, 9)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"architectures": []}, "architecture ''"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointRefused, match=named):
        read(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general.architecture": "gemma"}, "gemma"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"llama.rope.dimension_count": 8, "llama.attention.key_length": 16}, "partial rotary"),
        ({"llama.block_count": None}, "lacks llama.block_count"),
    ],
)
def test_what_is_not_supported_in_gguf_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointRefused, match=named):
        config_from_gguf({**GGUF, **changes}, tied_head=True)


QWEN = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "max_window_layers": 2}


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 64}, 64),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, None),
        (QWEN, None),
        ({**QWEN, "use_sliding_window": False}, None),
        ({**QWEN, "use_sliding_window": True, "layer_types": ["full_attention"] * 2}, None),
        ({**QWEN, "use_sliding_window": True, "max_window_layers": 0}, 64),
    ],
)
def test_a_sliding_window_counts_where_the_architecture_uses_it(
    tmp_path: Path, changes: dict[str, Any], window: int | None
) -> None:
    assert read(tmp_path, **changes).sliding_window == window


@pytest.mark.parametrize("changes", [{}, {"layer_types": ["full_attention", "sliding_attention"]}])
def test_a_window_in_some_layers_alone_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointRefused, match="some layers alone"):
        read(tmp_path, **QWEN, use_sliding_window=True, **changes)


def test_a_broken_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointRefused, match=r"cannot read config\.json"):
        config_from_folder(tmp_path)
