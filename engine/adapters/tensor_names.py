"""Tensor names of adapter files: placed as a LoRA factor, known and ignored, or refused by name.

PEFT saves `base_model.model.<module>.lora_A.weight`, with an adapter name before `.weight` in some
versions, and `<module>.lora_embedding_A` for embeddings. Every other layout that trainers are known
to write is told apart here, so that a refusal says what the file is. Nothing is dropped silently.
"""

import re
from dataclasses import dataclass
from typing import Literal

PREFIX = "base_model.model."
MAX_NAME_CHARACTERS = 512

Side = Literal["A", "B"]


@dataclass(frozen=True, slots=True)
class LoraFactor:
    """One half of a pair. `module` is the base's own name, such as model.layers.0.mlp.up_proj."""

    module: str
    side: Side
    embedding: bool


@dataclass(frozen=True, slots=True)
class BaseWeight:
    """A copy of the base's weight that PEFT stores beside a targeted embedding or head."""

    module: str


@dataclass(frozen=True, slots=True)
class RefusedName:
    """A name that cannot be served; `code` is one of the table in findings.py."""

    code: str


ParsedName = LoraFactor | BaseWeight | RefusedName

_FACTOR = re.compile(r"(?P<module>[^ ]+)\.lora_(?P<side>[AB])(\.[^. ]+)?\.weight")
_EMBEDDING = re.compile(r"(?P<module>[^ ]+)\.lora_embedding_(?P<side>[AB])(\.[^. ]+)?")
_BASE_WEIGHT = re.compile(r"(?P<module>[^ ]+)\.base_layer\.weight")

# The first that occurs decides; what marks the whole file as another format comes first.
_LAYOUTS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\.lora_(up|down)(\.|$)|^lora_(unet|te\d?|transformer)_"), "kohya_names"),
    (re.compile(r"\.lora_[ab]$|^(?!base_model\.).*\.linear\.(weight|biases|scales)$"), "mlx_names"),
    (re.compile(r"\.experts(\.|$).*lora_"), "expert_lora"),
    (re.compile(r"\.(modules_to_save|original_module)\."), "modules_to_save_tensors"),
    (re.compile(r"\.(trainable_tokens|token_adapter)"), "trainable_token_tensors"),
    (re.compile(r"\.lora_magnitude_vector"), "dora_tensors"),
    (re.compile(r"\.lora_E(\.|$)|\.ranknum"), "adalora_tensors"),
    (re.compile(r"\.lora_diag(\.|$)"), "kasa_tensors"),
    (re.compile(r"\.(qweight|qzeros|scales|g_idx|inv_freq|absmax|quant_map|quant_state\S*"
                r"|weight_format|SCB)$"), "base_state_saved"),
    (re.compile(r"\.bias$"), "bias_tensors"),
    (re.compile(r"\.lora_[AB](\.(?!weight$)[^.]+)?$"), "lora_without_weight"),
)  # fmt: skip


def parse_name(name: str) -> ParsedName:
    """What the tensor called `name` is. Time is linear in the (bounded) name."""
    if len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
        return RefusedName("unknown_tensor")
    for layout, code in _LAYOUTS:
        if layout.search(name):
            return RefusedName(code)
    if not name.startswith(PREFIX):
        return RefusedName("unknown_prefix" if ".lora_" in name else "unknown_tensor")
    rest = name.removeprefix(PREFIX)
    if match := _BASE_WEIGHT.fullmatch(rest):
        return BaseWeight(match["module"])
    for pattern, embedding in ((_FACTOR, False), (_EMBEDDING, True)):
        if match := pattern.fullmatch(rest):
            return LoraFactor(match["module"], "A" if match["side"] == "A" else "B", embedding)
    if rest.endswith(".weight") and "lora_" not in rest:
        return RefusedName("full_weight")
    return RefusedName("unknown_tensor")
