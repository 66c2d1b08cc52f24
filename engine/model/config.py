"""What a checkpoint says about its architecture, from config.json or from GGUF metadata."""

import json
import math
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

    kind: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    whole_corrections: bool = True  # yarn: the bounds of the blend are rounded outwards
    amplitude: float = 1.0  # yarn: cos and sin are multiplied by it


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family: Llama, Mistral, Qwen2 and Qwen3 differ in the last fields."""

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
    qkv_bias: bool = False
    qk_norm: bool = False  # every head of q and k is normalized before its rotation
    sliding_window: int | None = None  # positions that a token sees, itself included

    @property
    def q_width(self) -> int:
        """Columns of q_proj's output."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of k_proj's output, and of v_proj's."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class _Family:
    """What an architecture's name implies."""

    name: str
    bias: bool = False  # of q, k and v
    qk_norm: bool = False


_FOLDER_FAMILIES = {
    "LlamaForCausalLM": _Family("llama"),
    "MistralForCausalLM": _Family("mistral"),
    "Qwen2ForCausalLM": _Family("qwen2", bias=True),
    "Qwen3ForCausalLM": _Family("qwen3", qk_norm=True),
}
_GGUF_FAMILIES = {
    "llama": _Family("llama"),
    "qwen2": _Family("qwen2", bias=True),
    "qwen3": _Family("qwen3", qk_norm=True),
}


def config_from_folder(folder: Path) -> ModelConfig:
    """Reads config.json and generation_config.json of a Hugging Face checkpoint folder."""
    raw = read_json(folder / "config.json")
    architecture = (raw.get("architectures") or [""])[0]
    family = _FOLDER_FAMILIES.get(architecture)
    if family is None:
        raise CheckpointRefused(
            f"architecture {architecture!r} is not supported: {', '.join(_FOLDER_FAMILIES)}"
        )
    for option in ("attention_bias", "mlp_bias"):
        if raw.get(option):
            raise CheckpointRefused(f"{option} is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointRefused(f"hidden_act {raw['hidden_act']!r} is not supported: silu")
    generation = folder / "generation_config.json"
    eos = (read_json(generation) if generation.is_file() else {}).get("eos_token_id")
    heads = raw["num_attention_heads"]
    # transformers 5 writes rope_parameters, earlier ones rope_theta and rope_scaling
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return ModelConfig(
        architecture=family.name,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        layers=raw["num_hidden_layers"],
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        norm_eps=raw["rms_norm_eps"],
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        rope_scaling=_rope_scaling(rope, raw["max_position_embeddings"]),
        context_length=raw["max_position_embeddings"],
        tied_head=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=_token_ids(eos if eos is not None else raw.get("eos_token_id")),
        qkv_bias=family.bias,
        qk_norm=family.qk_norm,
        sliding_window=_sliding_window(raw, family),
    )


def _sliding_window(raw: dict[str, Any], family: _Family) -> int | None:
    """All layers alike: a mixture is refused. Qwen has its own switch for the window."""
    window: int | None = raw.get("sliding_window")
    if window is None or (family.name.startswith("qwen") and not raw.get("use_sliding_window")):
        return None
    kinds = set(raw.get("layer_types") or ["sliding_attention"])
    if kinds == {"full_attention"}:
        return None
    from_layer = raw.get("max_window_layers", 0) if family.name.startswith("qwen") else 0
    if kinds != {"sliding_attention"} or (from_layer and "layer_types" not in raw):
        raise CheckpointRefused("sliding_window in some layers alone is not supported")
    return window


def config_from_gguf(metadata: dict[str, Any], *, tied_head: bool) -> ModelConfig:
    """Reads the `<architecture>.*` keys of a GGUF file. `tied_head`: it has no output.weight."""
    architecture = metadata.get("general.architecture")
    family = _GGUF_FAMILIES.get(str(architecture))
    if family is None:
        raise CheckpointRefused(
            f"architecture {architecture!r} is not supported: {', '.join(_GGUF_FAMILIES)}"
        )

    def key(name: str, default: Any = None) -> Any:
        value = metadata.get(f"{family.name}.{name}", default)
        if value is None:
            raise CheckpointRefused(f"the GGUF metadata lacks {family.name}.{name}")
        return value

    if key("expert_count", 0):
        raise CheckpointRefused("mixture-of-experts models are not supported")
    heads = key("attention.head_count")
    scaling = key("rope.scaling.type", "none")
    if scaling not in ("none", "linear", "yarn"):
        raise CheckpointRefused(f"rope scaling {scaling!r} is not supported: none, linear, yarn")
    head_dim = key("attention.key_length", key("embedding_length") // heads)
    if head_dim != key("rope.dimension_count", head_dim):
        raise CheckpointRefused("partial rotary embeddings are not supported")
    rope = {
        "rope_type": "default" if scaling == "none" else scaling,
        "factor": key("rope.scaling.factor", 1.0),
        "original_max_position_embeddings": key(
            "rope.scaling.original_context_length", key("context_length")
        ),
    }
    eos = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    vocab_size = metadata.get(f"{family.name}.vocab_size")
    return ModelConfig(
        architecture=family.name,
        vocab_size=vocab_size or len(metadata["tokenizer.ggml.tokens"]),
        hidden_size=key("embedding_length"),
        intermediate_size=key("feed_forward_length"),
        layers=key("block_count"),
        heads=heads,
        kv_heads=key("attention.head_count_kv", heads),
        head_dim=head_dim,
        norm_eps=key("attention.layer_norm_rms_epsilon"),
        rope_theta=float(key("rope.freq_base", 10000.0)),
        rope_scaling=_rope_scaling(rope, key("context_length")),
        context_length=key("context_length"),
        tied_head=tied_head,
        eos_token_ids=_token_ids([token for token in eos if token is not None]),
        qkv_bias=family.bias,
        qk_norm=family.qk_norm,
        sliding_window=metadata.get(f"{family.name}.attention.sliding_window"),
    )


def _rope_scaling(raw: dict[str, Any], context: int) -> RopeScaling:
    """`raw`: Hugging Face's rope parameters; `context`: the model's stated length."""
    kind = raw.get("rope_type") or raw.get("type") or "default"
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling("linear", float(raw["factor"]))
    original = int(raw.get("original_max_position_embeddings") or context)
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            float(raw["factor"]),
            float(raw["low_freq_factor"]),
            float(raw["high_freq_factor"]),
            original,
        )
    if kind == "yarn":
        return RopeScaling(
            "yarn",
            float(raw["factor"]),
            original_context=original,
            beta_fast=float(raw.get("beta_fast") or 32.0),
            beta_slow=float(raw.get("beta_slow") or 1.0),
            whole_corrections=bool(raw.get("truncate", True)),
            amplitude=_yarn_amplitude(raw),
        )
    raise CheckpointRefused(f"rope scaling {kind!r} is not supported: linear, llama3, yarn")


def _yarn_amplitude(raw: dict[str, Any]) -> float:
    """Section 3.4 of https://arxiv.org/abs/2309.00071, and DeepSeek's two `mscale` parameters."""
    if raw.get("attention_factor") is not None:
        return float(raw["attention_factor"])

    def growth(weight: float) -> float:
        factor = float(raw["factor"])
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    if raw.get("mscale") and raw.get("mscale_all_dim"):
        return growth(float(raw["mscale"])) / growth(float(raw["mscale_all_dim"]))
    return growth(1.0)


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(dict.fromkeys(value)) if isinstance(value, list) else (value,)


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointRefused."""
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointRefused(f"cannot read {file.name}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointRefused(f"{file.name} is not a JSON object")
    return value
