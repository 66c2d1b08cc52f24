"""The check of adapter_config.json: what PEFT wrote, judged without PEFT and without the base.

An allow-list: a key of PEFT's LoraConfig has a rule or is known to be harmless; any other key with
a value warns. `target_modules` is never run as a regex: the tensors' names decide. null always
means unset. The rules follow peft.LoraConfig of PEFT 0.3 to 0.21.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from engine.adapters.findings import Finding, FindingList, clip, clip_names, finding
from engine.adapters.patterns import (
    MAX_PATTERNS,
    MAX_REGEX_PATTERNS,
    ModulePattern,
    PatternRefused,
    PatternTable,
)
from engine.adapters.strict_json import JsonRefused, parse_object

MAX_CONFIG_BYTES = 256 * 1024
_AS_SAVED = "send the file as PEFT's save_pretrained wrote it"
MAX_ALPHA = 1e6

_V = TypeVar("_V")
Verdict = Literal["accept", "warn", "reject"]

HARMLESS_KEYS = frozenset({
    "peft_version", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout",
    "merge_weights", "megatron_config", "megatron_core", "qalora_group_size", "eva_config",
    "corda_config", "lora_ga_config", "velora_config", "runtime_config", "exclude_modules",
    "loftq_config",
})  # fmt: skip
"""Keys that do not change what the stored A and B mean (loftq_config has a rule below)."""

RULED_KEYS = frozenset({
    "peft_type", "task_type", "auto_mapping", "r", "lora_alpha", "use_rslora", "rank_pattern",
    "alpha_pattern", "target_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out",
    "bias", "lora_bias", "init_lora_weights", "ensure_weight_tying",
})  # fmt: skip

REFUSED_WHEN_SET: dict[str, tuple[str, str]] = {
    "use_dora": ("unsupported_dora", "train with use_dora=false"),
    "modules_to_save": ("unsupported_modules_to_save", "train LoRA factors only"),
    "trainable_token_indices": ("unsupported_trainable_tokens", "train LoRA factors only"),
    "target_parameters": ("unsupported_target_parameters", "target linear modules instead"),
    "layer_replication": ("unsupported_layer_replication", "train on the base's own layers"),
    "use_qalora": ("unsupported_qalora", "train with use_qalora=false"),
    "alora_invocation_tokens": ("unsupported_alora", "train an ordinary LoRA"),
    "alora_invocation_string": ("unsupported_alora", "train an ordinary LoRA"),
    "invocation_string": ("unsupported_alora", "train an ordinary LoRA"),
    "use_bdlora": ("unsupported_bdlora", "train an ordinary LoRA"),
    "kasa_config": ("unsupported_kasa", "train an ordinary LoRA"),
    "arrow_config": ("unsupported_arrow", "upload the routed adapters one by one"),
    "monteclora_config": ("unsupported_monteclora", "train an ordinary LoRA"),
    "enable_lora": ("unsupported_merged_linear", "train q, k and v as separate targets"),
    "loftq_config": ("unsupported_base_changing_init", "LoftQ changed the base's weights"),
}
"""Keys that are refused by name when their value says something."""

HARMLESS_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica", "true", "false"})
BASE_CHANGING_INITS = ("pissa", "olora", "corda", "lora_ga", "loftq")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What of adapter_config.json decides how the stored factors are used."""

    rank: int
    alpha: float
    rslora: bool
    rank_pattern: PatternTable[int]
    alpha_pattern: PatternTable[float]
    target_modules: tuple[str, ...] | None  # None: a regex, "all-linear" or not given
    layers_to_transform: tuple[int, ...] | None
    weight_tying: bool
    base_model_name: str | None

    def rank_of(self, module: str) -> int:
        """The rank that PEFT would give the module of this full name."""
        return self.rank_pattern.get(module, self.rank)

    def alpha_of(self, module: str) -> float:
        """The alpha that PEFT would give the module of this full name."""
        return self.alpha_pattern.get(module, self.alpha)


@dataclass(frozen=True, slots=True)
class ConfigReport:
    """The verdict on one config; `config` is None when it was rejected."""

    verdict: Verdict
    findings: tuple[Finding, ...]
    config: AdapterConfig | None

    @property
    def codes(self) -> list[str]:
        """Why: the failures' labels when rejected, else the warnings'. Sorted, each once."""
        shown = "fail" if self.verdict == "reject" else "warn"
        return sorted({f.label for f in self.findings if f.severity == shown})


def lora_scale(alpha: float, rank: int, rslora: bool) -> float:
    """What B A x is multiplied by: alpha / rank, or alpha / sqrt(rank) with rsLoRA.

    rsLoRA: Kalajdzievski 2023, arXiv 2312.03732.
    """
    return alpha / math.sqrt(rank) if rslora else alpha / rank


def check_config(data: bytes, max_rank: int) -> ConfigReport:
    """Judges the bytes of an adapter_config.json. Never raises on what a client sent."""
    if len(data) > MAX_CONFIG_BYTES:
        message = (
            f"adapter_config.json has {len(data)} bytes; at most {MAX_CONFIG_BYTES} are read. "
            f"PEFT's own has a few thousand: {_AS_SAVED}"
        )
        return _report([finding("config_too_large", message, size_bytes=len(data))], None)
    try:
        raw = parse_object(data)
    except JsonRefused as refusal:
        message = f"adapter_config.json: {refusal.message}"
        if refusal.code != "byte_order_mark":
            message += f"; {_AS_SAVED}"
        return _report([finding(refusal.code, message, at=refusal.field)], None)
    return _Checker(raw, max_rank).run()


def rank_beyond(data: bytes, max_rank: int) -> Finding | None:
    """The first rank that a config states and that is no whole number from 1 to `max_rank`.

    For an answer before the files are kept: it looks at nothing else, and is None where the config
    is no readable LoRA config, which `check_config` tells.
    """
    try:
        raw = parse_object(data)
    except JsonRefused:
        return None
    if raw.get("peft_type") != "LORA":
        return None
    checker = _Checker(raw, max_rank)
    pattern = raw.get("rank_pattern")
    entries = list(pattern.items())[:MAX_PATTERNS] if isinstance(pattern, dict) else []
    for key, value in [("r", raw.get("r")), *((f"rank_pattern.{clip(k)}", v) for k, v in entries)]:
        if value is not None:
            checker._rank_value(value, key)
    return next(iter(checker.findings.done()), None)


def _report(findings: Sequence[Finding], config: AdapterConfig | None) -> ConfigReport:
    severities = {f.severity for f in findings}
    if "fail" in severities:
        return ConfigReport("reject", tuple(findings), None)
    return ConfigReport("warn" if "warn" in severities else "accept", tuple(findings), config)


def says_something(value: object) -> bool:
    """False for null, false, 0, and what is empty."""
    return bool(value)


class _Checker:
    """Applies the rules to one parsed object, collecting findings."""

    def __init__(self, raw: dict[str, Any], max_rank: int) -> None:
        self.raw = raw
        self.max_rank = max_rank
        self.findings = FindingList()

    def run(self) -> ConfigReport:
        if self.raw.get("peft_type") != "LORA":
            shown = clip(self.raw["peft_type"]) if self.raw.get("peft_type") else "not given"
            self._add("unsupported_peft_type", f"peft_type is {shown}; upload a LORA adapter",
                      "peft_type")  # fmt: skip
            return _report(self.findings.done(), None)
        for rule in (self._task, self._model_class, self._refused, self._bias, self._init,
                     self._fan_in_fan_out, self._unknown):  # fmt: skip
            rule()
        config = AdapterConfig(
            rank=self._rank(),
            alpha=self._alpha(),
            rslora=self._flag("use_rslora"),
            rank_pattern=self._pattern("rank_pattern", self._rank_value),
            alpha_pattern=self._pattern("alpha_pattern", self._alpha_value),
            target_modules=self._target_modules(),
            layers_to_transform=self._layers(),
            weight_tying=self._flag("ensure_weight_tying"),
            base_model_name=self._base_model_name(),
        )
        return _report(self.findings.done(), config)

    def _add(self, code: str, message: str, at: str) -> None:
        self.findings.add(code, message, at)

    def _invalid(self, key: str, wanted: str) -> None:
        self._add("invalid_value", f"{key} is {clip(self.raw[key])}; it must be {wanted}", key)

    # ------------------------------------------------------------------ what kind of adapter

    def _task(self) -> None:
        task = self.raw.get("task_type")
        if task is None or task == "CAUSAL_LM":
            return
        spelled = "".join(c for c in str(task).rpartition(".")[2].lower() if c.isalnum())
        if isinstance(task, str) and spelled == "causallm":
            self._add("task_type_spelling", f"task_type {clip(task)} is read as CAUSAL_LM",
                      "task_type")  # fmt: skip
        else:
            self._add("unsupported_task_type",
                      f"task_type is {clip(task)}; only CAUSAL_LM (or null) is served",
                      "task_type")  # fmt: skip

    def _model_class(self) -> None:
        mapping = self.raw.get("auto_mapping")
        if mapping is None:
            return
        if not isinstance(mapping, dict):
            self._invalid("auto_mapping", "an object or null")
            return
        name = mapping.get("base_model_class")
        if name is None:
            return
        if not isinstance(name, str) or not name.endswith(("ForCausalLM", "LMHeadModel")):
            self._add("unsupported_model_class",
                      f"the adapter was made for the class {clip(name)}, which is no causal LM",
                      "auto_mapping.base_model_class")  # fmt: skip

    def _refused(self) -> None:
        for key, (code, remedy) in REFUSED_WHEN_SET.items():
            value = self.raw.get(key)
            if says_something(value):
                self._add(code, f"{key} is {clip(value)}; {remedy}", key)

    def _bias(self) -> None:
        bias = self.raw.get("bias")
        if says_something(bias) and bias != "none":
            self._add("unsupported_bias", f"bias is {clip(bias)}; train with bias='none'", "bias")
        if says_something(self.raw.get("lora_bias")):
            self._add("unsupported_bias", "lora_bias is set; train with lora_bias=false",
                      "lora_bias")  # fmt: skip

    def _init(self) -> None:
        init = self.raw.get("init_lora_weights")
        if init is None or isinstance(init, bool):
            return
        name = init.lower() if isinstance(init, str) else ""
        if name in HARMLESS_INITS:
            return
        if name.startswith(BASE_CHANGING_INITS):
            self._add("unsupported_base_changing_init",
                      f"init_lora_weights is {clip(init)}, which changed the base's weights; "
                      "convert the adapter to an ordinary LoRA when saving it",
                      "init_lora_weights")  # fmt: skip
        else:
            self._add("unsupported_init",
                      f"init_lora_weights is {clip(init)}, which is not known to leave the base "
                      "as it was; use true, false or gaussian", "init_lora_weights")  # fmt: skip

    def _fan_in_fan_out(self) -> None:
        if self._flag("fan_in_fan_out"):
            self._add("fan_in_fan_out_ignored",
                      "fan_in_fan_out is true; A and B are read the ordinary way",
                      "fan_in_fan_out")  # fmt: skip

    def _unknown(self) -> None:
        known = HARMLESS_KEYS | RULED_KEYS | REFUSED_WHEN_SET.keys()
        for key in sorted(self.raw.keys() - known):
            if says_something(self.raw[key]):
                self._add("unknown_key", f"the key {clip(key)} is not known and is ignored",
                          clip(key))  # fmt: skip

    # ------------------------------------------------------------------ the figures

    def _rank_value(self, value: object, key: str) -> int | None:
        if type(value) is int and 1 <= value <= self.max_rank:
            return value
        self._add("rank_out_of_range", self._wrong_rank(value, key), key)
        return None

    def _wrong_rank(self, value: object, key: str) -> str:
        span = f"a rank is a whole number from 1 to {self.max_rank}"
        if isinstance(value, str):
            return f'{key} is the string "{clip(value)}"; write the number without quotes: {span}'
        if type(value) is not int:
            return f"{key} is {clip(value)}; {span}, as the adapter was trained with"
        if value < 1:
            return (
                f"{key} is {clip(value)}; {span}: write the one that the adapter was trained with"
            )
        return (
            f"{key} is {clip(value)}, and ranks up to {self.max_rank} are taken here; train with a "
            "smaller rank, or ask the operator for a higher limit"
        )

    def _alpha_value(self, value: object, key: str) -> float | None:
        if type(value) in (int, float) and abs(value) <= MAX_ALPHA:  # type: ignore[arg-type]
            return float(value)  # type: ignore[arg-type]
        self._add("alpha_invalid",
                  f"{key} is {clip(value)}; an alpha is a number of at most {MAX_ALPHA:.0f}",
                  key)  # fmt: skip
        return None

    def _rank(self) -> int:
        if self.raw.get("r") is None:
            self._add("rank_out_of_range", f"r is not given; set it from 1 to {self.max_rank}", "r")
            return 1
        return self._rank_value(self.raw["r"], "r") or 1

    def _alpha(self) -> float:
        if self.raw.get("lora_alpha") is None:
            self._add("alpha_invalid", "lora_alpha is not given; state it", "lora_alpha")
            return 1.0
        return self._alpha_value(self.raw["lora_alpha"], "lora_alpha") or 0.0

    def _flag(self, key: str) -> bool:
        value = self.raw.get(key)
        if value is None or isinstance(value, bool):
            return value is True
        self._invalid(key, "true, false or null")
        return False

    def _pattern(self, key: str, read: Callable[[object, str], _V | None]) -> PatternTable[_V]:
        raw = self.raw.get(key)
        if raw is None:
            return PatternTable(())
        if not isinstance(raw, dict) or len(raw) > MAX_PATTERNS:
            self._invalid(key, f"an object with at most {MAX_PATTERNS} names, or null")
            return PatternTable(())
        entries: list[tuple[ModulePattern, _V]] = []
        refused: list[str] = []
        for name, value in raw.items():
            figure = read(value, f"{key}.{clip(name)}")
            try:
                pattern = ModulePattern(name)
            except PatternRefused as refusal:
                refused.append(f"{clip(name)} {refusal}")
                continue
            if figure is not None:
                entries.append((pattern, figure))
        if refused:
            self._add("unsupported_pattern",
                      f"{key}: {clip_names(refused)}; write plain module names instead",
                      key)  # fmt: skip
        if sum(pattern.plain is None for pattern, _ in entries) > MAX_REGEX_PATTERNS:
            self._add("unsupported_pattern",
                      f"{key} has more than {MAX_REGEX_PATTERNS} keys that are patterns; "
                      "write plain module names instead", key)  # fmt: skip
        return PatternTable(entries)

    def _target_modules(self) -> tuple[str, ...] | None:
        value = self.raw.get("target_modules")
        if value is None or isinstance(value, str):
            return None
        if isinstance(value, list) and all(isinstance(name, str) for name in value):
            return tuple(value)
        self._invalid("target_modules", "a list of names, a string or null")
        return None

    def _layers(self) -> tuple[int, ...] | None:
        pattern = self.raw.get("layers_pattern")
        listed = pattern if isinstance(pattern, list) else [pattern]
        if pattern is not None and not all(isinstance(name, str) for name in listed):
            self._invalid("layers_pattern", "a name, a list of names or null")
        value = self.raw.get("layers_to_transform")
        if value is None:
            return None
        layers = value if isinstance(value, list) else [value]
        if not all(type(layer) is int and layer >= 0 for layer in layers):
            self._invalid("layers_to_transform", "a layer number, a list of them or null")
            return None
        return tuple(layers) or None

    def _base_model_name(self) -> str | None:
        name = self.raw.get("base_model_name_or_path")
        return clip(name, 200) if isinstance(name, str) and name else None
