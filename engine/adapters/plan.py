"""Where every tensor of an adapter goes on this base model, and with which scale.

Nothing is dropped silently: each tensor ends as half of a pair, as a known copy of the base's own
weight, or in a finding that fails. Ranks come from the tensors and must agree with the config.
"""

from collections import defaultdict
from dataclasses import dataclass

from engine.adapters.config import AdapterConfig, lora_scale
from engine.adapters.findings import Finding, FindingList, clip_names
from engine.adapters.safetensors_header import SafetensorsHeader, TensorInfo
from engine.adapters.tensor_names import PREFIX, BaseWeight, LoraFactor, RefusedName, parse_name
from engine.errors import AdapterRefused
from engine.types import EDGE_TARGETS, ModelDescription, ModuleSpec

REMEDIES: dict[str, str] = {
    "unknown_prefix": f"names must begin with {PREFIX}, as PEFT's save_pretrained writes them",
    "unknown_tensor": "the name is of no layout that PEFT writes for LoRA",
    "full_weight": "whole weights are not served; save the LoRA factors only",
    "base_state_saved": "save with save_pretrained, which leaves the base out",
    "mlx_names": "convert from mlx-lm to PEFT (transposed factors, other names)",
    "kohya_names": "convert from kohya to PEFT",
    "adalora_tensors": "AdaLoRA is not served",
    "expert_lora": "LoRA on fused experts is not served",
    "lora_without_weight": "lora_A and lora_B of a linear must end in .weight",
    "dora_tensors": "train with use_dora=false",
    "bias_tensors": "train with bias='none' and lora_bias=false",
    "modules_to_save_tensors": "train without modules_to_save",
    "trainable_token_tensors": "train without trainable_token_indices",
    "kasa_tensors": "KaSA is not served",
}
"""What to do about a tensor whose name is refused."""


@dataclass(frozen=True, slots=True)
class PlannedPair:
    """One LoRA pair: y += scale * B(A x), for module `module` of the description."""

    module: int  # index into ModelDescription.modules
    rank: int
    scale: float
    a: TensorInfo  # [rank, in]
    b: TensorInfo  # [out, rank]
    embedding: bool = False  # A is looked up by token, not multiplied


@dataclass(frozen=True, slots=True)
class PlannedBaseWeight:
    """A stored copy of the base's weight [out, in] of module `module`; compared, never used."""

    module: int
    tensor: TensorInfo


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """`pairs` by module index. The plan is usable when no finding fails."""

    pairs: tuple[PlannedPair, ...]
    base_weights: tuple[PlannedBaseWeight, ...]
    findings: tuple[Finding, ...]
    tensors: int  # in the file
    placed: int  # in pairs
    ignored: int  # copies of base weights

    @property
    def failures(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity == "fail")

    @property
    def coverage(self) -> str:
        """ "420 of 420 tensors placed" and what else there was."""
        text = f"{self.placed} of {self.tensors} tensors placed"
        return f"{text}, {self.ignored} ignored by name" if self.ignored else text

    def require(self) -> "AdapterPlan":
        """The plan itself. Raises AdapterRefused with the first failure when there is one."""
        if self.failures:
            first = self.failures[0]
            raise AdapterRefused(first.message, code=first.code, field=first.field)
        return self


def plan_adapter(
    config: AdapterConfig, header: SafetensorsHeader, description: ModelDescription
) -> AdapterPlan:
    """Places every tensor of `header` on the modules of `description`. Never raises; pure."""
    return _Planner(config, header, description).run()


class _Planner:
    def __init__(
        self, config: AdapterConfig, header: SafetensorsHeader, description: ModelDescription
    ) -> None:
        self.config = config
        self.tensors = header.tensors
        self.description = description
        self.index = {module.name: i for i, module in enumerate(description.modules)}
        self.factors: dict[int, dict[tuple[str, bool], TensorInfo]] = defaultdict(dict)
        self.base_weights: list[PlannedBaseWeight] = []
        self.refused: dict[str, list[str]] = defaultdict(list)
        self.findings = FindingList()

    def run(self) -> AdapterPlan:
        for tensor in self.tensors:
            self._place(tensor)
        self._explain_names()
        pairs = [p for index in sorted(self.factors) if (p := self._pair(index)) is not None]
        self._base_weights_note()
        if pairs:
            self._compare_with_config(pairs)
        return AdapterPlan(
            tuple(pairs),
            tuple(self.base_weights),
            self.findings.done(),
            tensors=len(self.tensors),
            placed=2 * len(pairs),
            ignored=len(self.base_weights),
        )

    def _add(self, code: str, message: str, at: str | None = None, **figures: int) -> None:
        self.findings.add(code, message, at, **figures)

    # ------------------------------------------------------------------ names

    def _place(self, tensor: TensorInfo) -> None:
        parsed = parse_name(tensor.name)
        if isinstance(parsed, RefusedName):
            self.refused[parsed.code].append(tensor.name)
            return
        index = self.index.get(parsed.module)
        if index is None:
            self.refused["module_not_in_base"].append(tensor.name)
        elif isinstance(parsed, BaseWeight):
            self._place_base_weight(index, tensor)
        else:
            self._place_factor(index, parsed, tensor)

    def _place_factor(self, index: int, factor: LoraFactor, tensor: TensorInfo) -> None:
        key = (factor.side, factor.embedding)
        if key in self.factors[index]:
            self.refused["duplicate_tensor"].append(tensor.name)
        else:
            self.factors[index][key] = tensor

    def _place_base_weight(self, index: int, tensor: TensorInfo) -> None:
        module = self.description.modules[index]
        expected = _weight_shape(module)
        if tensor.shape == expected:
            self.base_weights.append(PlannedBaseWeight(index, tensor))
            return
        self._wrong_shape(module, tensor, expected)

    def _explain_names(self) -> None:
        total = len(self.tensors)
        if total == 0:
            self._add("no_tensors", "the weights file holds no tensor")
        elif not self.factors:
            message = f"0 of {total} tensors matched a module of {self.description.name}"
            self._add("no_tensor_matched", f"{message}; see the reasons below", tensors=total)
        for code, names in self.refused.items():
            if code == "module_not_in_base":
                remedy = f"{self.description.name} has no such module"
            elif code == "duplicate_tensor":
                remedy = "the same matrix is stored twice"
            else:
                remedy = REMEDIES[code]
            plural = "tensor" if len(names) == 1 else "tensors"
            message = f"{len(names)} {plural} of {total}: {remedy} ({clip_names(names)})"
            self._add(code, message, tensors=len(names))

    # ------------------------------------------------------------------ pairs

    def _pair(self, index: int) -> PlannedPair | None:
        module = self.description.modules[index]
        found = self.factors[index]
        embedding = module.target == "embed_tokens"
        if any(kind != embedding for _, kind in found):
            wanted = "lora_embedding_A/B" if embedding else "lora_A.weight/lora_B.weight"
            self._add("embedding_layout", f"{module.name} needs {wanted}", module.name)
            return None
        a, b = found.get(("A", embedding)), found.get(("B", embedding))
        if a is None or b is None:
            missing = "lora_A" if a is None else "lora_B"
            self._add("missing_pair", f"{module.name} has no {missing}", module.name)
            return None
        return self._fitted(index, module, a, b)

    def _fitted(
        self, index: int, module: ModuleSpec, a: TensorInfo, b: TensorInfo
    ) -> PlannedPair | None:
        rank = a.shape[0] if len(a.shape) == 2 else 0
        expected_a, expected_b = (rank, module.in_features), (module.out_features, rank)
        fits = True
        for tensor, expected in ((a, expected_a), (b, expected_b)):
            if tensor.shape != expected:
                self._wrong_shape(module, tensor, expected)
                fits = False
        if not fits:
            return None
        limit = self.description.max_rank
        if not 1 <= rank <= limit:
            message = f"{module.name} has rank {rank}; this base is served with ranks 1 to {limit}"
            self._add("rank_above_limit", message, module.name, rank=rank, max_rank=limit)
            return None
        declared = self.config.rank_of(module.name)
        if rank != declared:
            message = (
                f"{module.name} has rank {rank} in the file, {declared} by the config; send the "
                "config that was saved with these weights"
            )
            self._add("rank_mismatch", message, module.name, rank=rank, declared=declared)
            return None
        alpha = self.config.alpha_of(module.name)
        scale = lora_scale(alpha, rank, self.config.rslora)
        return PlannedPair(index, rank, scale, a, b, module.target == "embed_tokens")

    def _wrong_shape(
        self, module: ModuleSpec, tensor: TensorInfo, expected: tuple[int, int]
    ) -> None:
        vocabulary = self.description.vocab_size
        other = sorted(set(expected) ^ set(tensor.shape) if len(tensor.shape) == 2 else ())
        message = f"{tensor.name} is {list(tensor.shape)}, {module.name} needs {list(expected)}"
        if module.target in EDGE_TARGETS and vocabulary in other:
            message += f"; this base has {vocabulary} tokens, and added tokens are not served"
            self._add("vocabulary_changed", message, module.name, vocab_size=vocabulary)
        else:
            self._add("shape_mismatch", message, module.name)

    # ------------------------------------------------------------------ against the config

    def _base_weights_note(self) -> None:
        if self.base_weights:
            names = [weight.tensor.name for weight in self.base_weights]
            self._add("base_weight_ignored",
                      f"{clip_names(names)}: the base's own weight is used instead",
                      tensors=len(names))  # fmt: skip

    def _compare_with_config(self, pairs: list[PlannedPair]) -> None:
        modules = [self.description.modules[pair.module] for pair in pairs]
        targets = {module.target for module in modules}
        if self.config.weight_tying and targets & set(EDGE_TARGETS):
            self._add("weight_tying",
                      "ensure_weight_tying ties the head's adapter to the embedding's; "
                      "train with ensure_weight_tying=false", "ensure_weight_tying")  # fmt: skip
        if "embed_tokens" in targets:
            self._add(
                "embedding_only_input",
                "the embed_tokens adapter changes the input embedding only, as in PEFT",
            )
        layers = {module.layer for module in modules if module.layer >= 0}
        declared = self.config.layers_to_transform
        if declared is not None and layers != set(declared):
            self._add("layers_to_transform_ignored",
                      f"layers_to_transform names {_short(declared)}, the tensors lie in "
                      f"{_short(layers)}; the tensors decide", "layers_to_transform")  # fmt: skip
        self._compare_targets(modules)

    def _compare_targets(self, modules: list[ModuleSpec]) -> None:
        declared = self.config.target_modules
        if declared is None:
            return
        beyond = [m.name for m in modules if not any(_targets(t, m.name) for t in declared)]
        if beyond:
            self._add("target_modules_ignored",
                      f"target_modules does not name {clip_names(beyond)}; the tensors decide",
                      "target_modules", modules=len(beyond))  # fmt: skip
        idle = [t for t in declared if not any(_targets(t, m.name) for m in modules)]
        if idle:
            self._add("targets_without_tensors",
                      f"no tensor belongs to the target {clip_names(idle)}",
                      "target_modules", targets=len(idle))  # fmt: skip


def _targets(target: str, module: str) -> bool:
    return module == target or module.endswith(f".{target}")


def _weight_shape(module: ModuleSpec) -> tuple[int, int]:
    """[out, in] of a linear; an embedding's weight is [vocab, hidden] = [in, out]."""
    if module.target == "embed_tokens":
        return module.in_features, module.out_features
    return module.out_features, module.in_features


def _short(layers: "set[int] | tuple[int, ...]") -> str:
    ordered = sorted(set(layers))
    shown = ", ".join(map(str, ordered[:8]))
    return f"layers {shown} and {len(ordered) - 8} more" if len(ordered) > 8 else f"layers {shown}"
