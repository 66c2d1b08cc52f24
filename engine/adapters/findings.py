"""What the checks of an adapter found: one table of stable codes, and the report made of them.

    Report ── CheckGroup "container" > "config" > "coverage" > "numbers" ── Finding

A finding's severity and group come from the table alone, so a code means one thing everywhere.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from dataclasses import field as data_field
from typing import Any, Literal

Severity = Literal["info", "warn", "fail"]
Status = Literal["pass", "warn", "fail", "skipped"]
GroupName = Literal["container", "config", "coverage", "numbers"]

GROUPS: tuple[GroupName, ...] = ("container", "config", "coverage", "numbers")
"""The order in which the checks run and are shown."""

CODES: dict[str, tuple[GroupName, Severity, str]] = {
    # --- container: the two files and the safetensors header
    "missing_file": ("container", "fail", "A file that an adapter consists of is not there."),
    "not_a_regular_file": ("container", "fail", "A file is a link, a folder or a device."),
    "empty_file": ("container", "fail", "A file has no content."),
    "file_too_large": ("container", "fail", "A file is larger than this server accepts."),
    "extra_file_ignored": ("container", "info", "A file beside the two is not part of an adapter."),
    "pickle_file": ("container", "fail", "The weights are a pickle, which is never opened."),
    "lfs_pointer": ("container", "fail", "The weights are a git-LFS pointer, not the file."),
    "not_safetensors": ("container", "fail", "The weights are in another format."),
    "truncated_file": ("container", "fail", "The file ends before its header says."),
    "trailing_bytes": ("container", "fail", "The file goes on after its last tensor."),
    "header_too_large": ("container", "fail", "The header claims more than 1 MiB."),
    "header_invalid": ("container", "fail", "The header is not a safetensors header."),
    "dtype_unsupported": ("container", "fail", "A tensor is not F32, F16 or BF16."),
    "offsets_mismatch": ("container", "fail", "A tensor's bytes do not fit its shape and dtype."),
    "offsets_overlap": ("container", "fail", "Two tensors share bytes."),
    "offsets_gap": ("container", "fail", "Bytes between two tensors belong to none."),
    # --- config: adapter_config.json alone
    "config_too_large": ("config", "fail", "The config is larger than 256 KiB."),
    "byte_order_mark": ("config", "fail", "The config begins with a byte-order mark."),
    "malformed_json": ("config", "fail", "The config is not one JSON object."),
    "json_too_deep": ("config", "fail", "The config is nested deeper than 16 levels."),
    "duplicate_key": ("config", "fail", "The config gives one key twice."),
    "invalid_value": ("config", "fail", "A known key has a value of the wrong type."),
    "unsupported_peft_type": ("config", "fail", "Only peft_type LORA is served."),
    "unsupported_task_type": ("config", "fail", "Only task_type CAUSAL_LM is served."),
    "unsupported_model_class": ("config", "fail", "The base class is not a causal LM."),
    "rank_out_of_range": ("config", "fail", "A rank is not a whole number in 1..max."),
    "alpha_invalid": ("config", "fail", "lora_alpha is missing or not a finite number."),
    "unsupported_pattern": ("config", "fail", "A pattern key uses regex syntax beyond the subset."),
    "unsupported_dora": ("config", "fail", "DoRA's magnitudes are not served."),
    "unsupported_bias": ("config", "fail", "Trained biases are not served."),
    "unsupported_modules_to_save": ("config", "fail", "Fully trained modules are not served."),
    "unsupported_trainable_tokens": ("config", "fail", "Trained token rows are not served."),
    "unsupported_target_parameters": ("config", "fail", "LoRA on bare parameters is not served."),
    "unsupported_layer_replication": ("config", "fail", "Replicated layers are not served."),
    "unsupported_qalora": ("config", "fail", "QA-LoRA pools its inputs; not served."),
    "unsupported_alora": ("config", "fail", "Activated LoRA is not served."),
    "unsupported_bdlora": ("config", "fail", "Block-diagonal LoRA is not served."),
    "unsupported_kasa": ("config", "fail", "KaSA changes the base; not served."),
    "unsupported_arrow": ("config", "fail", "Arrow routing is not served."),
    "unsupported_monteclora": ("config", "fail", "Sampled LoRA weights are not served."),
    "unsupported_merged_linear": ("config", "fail", "enable_lora (MergedLinear) is not served."),
    "unsupported_base_changing_init": ("config", "fail", "The initialisation changed the base."),
    "unsupported_init": ("config", "fail", "An initialisation that is not known to be harmless."),
    "task_type_spelling": ("config", "warn", "task_type is not spelled CAUSAL_LM."),
    "fan_in_fan_out_ignored": ("config", "warn", "A and B are stored the ordinary way."),
    "unknown_key": ("config", "warn", "A key that is not known has a value."),
    # --- coverage: every tensor is placed on a module of this base
    "no_tensors": ("coverage", "fail", "The file holds no tensor."),
    "no_tensor_matched": ("coverage", "fail", "Not one tensor names a module of this base."),
    "unknown_prefix": ("coverage", "fail", "Tensor names do not begin with base_model.model."),
    "unknown_tensor": ("coverage", "fail", "A tensor's name is of no known layout."),
    "module_not_in_base": ("coverage", "fail", "A tensor names a module that this base lacks."),
    "missing_pair": ("coverage", "fail", "A module has only one of lora_A and lora_B."),
    "duplicate_tensor": ("coverage", "fail", "Two tensors stand for the same matrix."),
    "shape_mismatch": ("coverage", "fail", "A tensor does not fit its module."),
    "vocabulary_changed": ("coverage", "fail", "The adapter was made for another vocabulary."),
    "rank_mismatch": ("coverage", "fail", "A tensor's rank is not the one the config gives."),
    "rank_above_limit": ("coverage", "fail", "A rank is above what this base is served with."),
    "embedding_layout": ("coverage", "fail", "Embedding and linear factors are mixed up."),
    "full_weight": ("coverage", "fail", "A whole weight is stored beside the adapter."),
    "base_state_saved": ("coverage", "fail", "The (quantized) base model's state is stored."),
    "mlx_names": ("coverage", "fail", "The tensors are in mlx-lm's layout."),
    "kohya_names": ("coverage", "fail", "The tensors are in kohya's layout."),
    "adalora_tensors": ("coverage", "fail", "The tensors are AdaLoRA's."),
    "expert_lora": ("coverage", "fail", "LoRA on fused experts is not served."),
    "lora_without_weight": ("coverage", "fail", "lora_A/lora_B lack the ending .weight."),
    "dora_tensors": ("coverage", "fail", "The file holds DoRA magnitudes."),
    "bias_tensors": ("coverage", "fail", "The file holds trained biases."),
    "modules_to_save_tensors": ("coverage", "fail", "The file holds fully trained modules."),
    "trainable_token_tensors": ("coverage", "fail", "The file holds trained token rows."),
    "kasa_tensors": ("coverage", "fail", "The file holds KaSA's singular values."),
    "weight_tying": ("coverage", "fail", "ensure_weight_tying ties the head to the embedding."),
    "base_weight_ignored": ("coverage", "warn", "A copy of the base's own weight is ignored."),
    "layers_to_transform_ignored": ("coverage", "warn", "The tensors name other layers."),
    "target_modules_ignored": ("coverage", "warn", "The tensors name other modules."),
    "targets_without_tensors": ("coverage", "info", "A target of the config has no tensors."),
    "embedding_only_input": ("coverage", "info", "Tied or not, only the input side changes."),
    # --- numbers: what the tensors hold
    "file_changed": ("numbers", "fail", "The file changed between two reads."),
    "non_finite": ("numbers", "fail", "A tensor holds NaN or infinity."),
    "zero_effect": ("numbers", "fail", "The adapter changes nothing."),
    "base_weight_differs": ("numbers", "fail", "A stored base weight is not this base's."),
    "module_without_effect": ("numbers", "info", "Some modules' updates are zero."),
    "large_update": ("numbers", "warn", "An update is larger than the weight it changes."),
}
"""code -> (group, severity, what it means). The message of a finding says what to do about it."""

NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check has to say. `figures` are JSON numbers and strings."""

    code: str
    severity: Severity
    message: str
    field: str | None = None
    figures: dict[str, Any] = data_field(default_factory=dict)

    @property
    def label(self) -> str:
        """The code, with the key for `unknown_key` (one code stands for any number of keys)."""
        return f"{self.code}:{self.field}" if self.code == "unknown_key" else self.code


def finding(code: str, message: str, *, at: str | None = None, **figures: Any) -> Finding:
    """A finding with the severity that the table gives its code; `at` names the field."""
    return Finding(code, CODES[code][1], message, at, figures)


MAX_FINDINGS_PER_CODE = 20


class FindingList:
    """Collects findings; a report stays small whatever the client sent."""

    def __init__(self) -> None:
        self._found: dict[str, list[Finding]] = {}
        self._order: list[Finding] = []
        self._left_out: dict[str, int] = {}

    def add(self, code: str, message: str, at: str | None = None, **figures: Any) -> None:
        """Keeps the first 20 of each code and counts the rest."""
        same = self._found.setdefault(code, [])
        if len(same) >= MAX_FINDINGS_PER_CODE:
            self._left_out[code] = self._left_out.get(code, 0) + 1
            return
        same.append(finding(code, message, at=at, **figures))
        self._order.append(same[-1])

    def done(self) -> tuple[Finding, ...]:
        """All that was kept, the last of an overfull code saying how many more there are."""
        result = list(self._order)
        for code, count in self._left_out.items():
            last = self._found[code][-1]
            result[result.index(last)] = replace(
                last,
                message=f"{last.message} (and {count} more of this kind)",
                figures={**last.figures, "more": count},
            )
        return tuple(result)


def status_of(findings: Iterable[Finding]) -> Status:
    """fail if any finding fails, else warn if any warns, else pass."""
    severities = {f.severity for f in findings}
    if "fail" in severities:
        return "fail"
    return "warn" if "warn" in severities else "pass"


@dataclass(frozen=True, slots=True)
class CheckGroup:
    """What one group of checks found; `skipped` when an earlier failure left nothing to check."""

    name: GroupName
    status: Status
    findings: tuple[Finding, ...] = ()
    figures: dict[str, Any] = data_field(default_factory=dict)

    @classmethod
    def of(
        cls, name: GroupName, findings: Iterable[Finding], figures: dict[str, Any] | None = None
    ) -> "CheckGroup":
        found = tuple(findings)
        return cls(name, status_of(found), found, figures or {})


def clip(value: object, limit: int = 60) -> str:
    """A client's value as it may be shown: one line, ASCII, at most `limit` characters."""
    text = value if isinstance(value, str) else repr(value)
    text = text[: limit + 1].encode("ascii", "backslashreplace").decode("ascii")
    text = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def clip_names(names: Iterable[str]) -> str:
    """The first few names, clipped, and how many more there are."""
    listed = list(names)
    shown = ", ".join(clip(name, 100) for name in listed[:NAMES_SHOWN])
    more = len(listed) - NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
