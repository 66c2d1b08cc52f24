"""What a checkpoint says about its architecture, from config.json or from GGUF metadata."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.errors import EngineError


class CheckpointRefused(EngineError):
    """This checkpoint cannot be served: the message names the part that is not supported."""

    code = "base_model_unsupported"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length the model was trained at."""

    kind: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    context_length: int
    tied_head: bool
    eos_token_ids: tuple[int, ...]

    @property
    def q_width(self) -> int:
        """Columns of q_proj's output."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of k_proj's output, and of v_proj's."""
        return self.kv_heads * self.head_dim


def config_from_folder(folder: Path) -> ModelConfig:
    """Reads config.json and generation_config.json of a Hugging Face checkpoint folder."""
    raw = _read_json(folder / "config.json")
    architecture = (raw.get("architectures") or [""])[0]
    if architecture != "LlamaForCausalLM":
        raise CheckpointRefused(f"architecture {architecture!r} is not supported: LlamaForCausalLM")
    for option in ("attention_bias", "mlp_bias"):
        if raw.get(option):
            raise CheckpointRefused(f"{option} is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointRefused(f"hidden_act {raw['hidden_act']!r} is not supported: silu")
    if raw.get("quantization_config"):
        raise CheckpointRefused("quantization_config is not supported: use a GGUF file")
    generation = folder / "generation_config.json"
    eos = (_read_json(generation) if generation.is_file() else {}).get("eos_token_id")
    heads = raw["num_attention_heads"]
    # transformers 5 writes rope_parameters, earlier ones rope_theta and rope_scaling
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return ModelConfig(
        architecture="llama",
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        layers=raw["num_hidden_layers"],
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        norm_eps=raw["rms_norm_eps"],
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        rope_scaling=_rope_scaling(rope),
        context_length=raw["max_position_embeddings"],
        tied_head=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=_token_ids(eos if eos is not None else raw.get("eos_token_id")),
    )


def config_from_gguf(metadata: dict[str, Any], *, tied_head: bool) -> ModelConfig:
    """Reads the `llama.*` keys of a GGUF file. `tied_head`: the file has no output.weight."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise CheckpointRefused(f"architecture {architecture!r} is not supported: llama")

    def key(name: str, default: Any = None) -> Any:
        value = metadata.get(f"llama.{name}", default)
        if value is None:
            raise CheckpointRefused(f"the GGUF metadata lacks llama.{name}")
        return value

    if key("expert_count", 0):
        raise CheckpointRefused("mixture-of-experts models are not supported")
    heads = key("attention.head_count")
    scaling = key("rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise CheckpointRefused(f"rope scaling {scaling!r} is not supported: none, linear")
    head_dim = key("rope.dimension_count", key("embedding_length") // heads)
    if head_dim != key("attention.key_length", head_dim):
        raise CheckpointRefused("partial rotary embeddings are not supported")
    eos = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    return ModelConfig(
        architecture="llama",
        vocab_size=metadata.get("llama.vocab_size") or len(metadata["tokenizer.ggml.tokens"]),
        hidden_size=key("embedding_length"),
        intermediate_size=key("feed_forward_length"),
        layers=key("block_count"),
        heads=heads,
        kv_heads=key("attention.head_count_kv", heads),
        head_dim=head_dim,
        norm_eps=key("attention.layer_norm_rms_epsilon"),
        rope_theta=float(key("rope.freq_base", 10000.0)),
        rope_scaling=RopeScaling(scaling, float(key("rope.scaling.factor", 1.0))),
        context_length=key("context_length"),
        tied_head=tied_head,
        eos_token_ids=_token_ids([token for token in eos if token is not None]),
    )


def _rope_scaling(raw: dict[str, Any]) -> RopeScaling:
    kind = raw.get("rope_type") or raw.get("type") or "default"
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling("linear", float(raw["factor"]))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            float(raw["factor"]),
            float(raw["low_freq_factor"]),
            float(raw["high_freq_factor"]),
            int(raw["original_max_position_embeddings"]),
        )
    raise CheckpointRefused(f"rope scaling {kind!r} is not supported: linear, llama3")


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(dict.fromkeys(value)) if isinstance(value, list) else (value,)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointRefused(f"cannot read {file.name}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointRefused(f"{file.name} is not a JSON object")
    return value
