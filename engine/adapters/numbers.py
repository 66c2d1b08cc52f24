"""What an adapter's numbers say: all finite, how large each update is, whether it has any effect.

||scale * B A||_F is found without forming B A: ||B A||_F^2 = trace((B^T B)(A A^T)), two Gram
matrices of [rank, rank], accumulated in float64 over bounded blocks.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.adapters.findings import Finding, FindingList, clip_names
from engine.adapters.plan import AdapterPlan, PlannedBaseWeight, PlannedPair
from engine.adapters.safetensors_header import TensorInfo
from engine.adapters.sketch import sketch_distance, weight_sketch
from engine.adapters.tensor_data import TensorData
from engine.types import EDGE_TARGETS, ModelDescription

LARGE_UPDATE = 1.0
"""An update whose norm is above the weight's own is shown as a warning."""
EDGE_TOLERANCE, BLOCK_TOLERANCE = 0.03, 0.2
"""How far a stored base weight may lie from the served one, which is rounded to 8 or 4 bits."""


@dataclass(frozen=True, slots=True)
class ModuleFigures:
    """One pair's figures; norms are Frobenius norms, `update_norm` that of scale * B A."""

    module: str
    layer: int  # -1 outside the blocks
    rank: int
    scale: float
    a_norm: float
    b_norm: float
    update_norm: float
    base_norm: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.a_norm) and math.isfinite(self.b_norm)

    @property
    def ratio(self) -> float:
        """The update against the weight that it changes."""
        return self.update_norm / self.base_norm if self.base_norm > 0 else 0.0


@dataclass(frozen=True, slots=True)
class NumbersReport:
    modules: tuple[ModuleFigures, ...]
    findings: tuple[Finding, ...]

    @property
    def figures(self) -> dict[str, Any]:
        """A summary for the report: JSON numbers."""
        ratios = [m.ratio for m in self.modules]
        if not ratios:
            return {}
        largest = max(self.modules, key=lambda m: m.ratio)
        return {
            "modules": len(self.modules),
            "update_ratio_max": round(largest.ratio, 6),
            "update_ratio_max_module": largest.module,
            "update_ratio_mean": round(sum(ratios) / len(ratios), 6),
            "update_norm": round(math.sqrt(sum(m.update_norm**2 for m in self.modules)), 6),
            "update_ratio_by_layer": self._by_layer(),
        }

    def _by_layer(self) -> dict[str, float]:
        """Layer -> norm of its updates against the norm of the weights that they change."""
        squares: dict[int, tuple[float, float]] = {}
        for m in self.modules:
            if m.layer >= 0:
                update, base = squares.get(m.layer, (0.0, 0.0))
                squares[m.layer] = (update + m.update_norm**2, base + m.base_norm**2)
        return {
            str(layer): round(math.sqrt(update / base), 6) if base > 0 else 0.0
            for layer, (update, base) in sorted(squares.items())
        }


def measure_adapter(
    weights_path: Path, plan: AdapterPlan, description: ModelDescription
) -> NumbersReport:
    """Reads every tensor of `plan` once, in blocks of a few MiB.

    Raises AdapterRefused or AdapterCorrupt only where the file itself cannot be read.
    """
    found = FindingList()
    with TensorData(weights_path) as data, np.errstate(all="ignore"):
        modules = [_measure_pair(data, pair, description) for pair in plan.pairs]
        _judge(modules, found)
        for weight in plan.base_weights:
            _compare_base(data, weight, description, found)
    finite = tuple(m for m in modules if m.finite)
    return NumbersReport(finite, found.done())


def _measure_pair(
    data: TensorData, pair: PlannedPair, description: ModelDescription
) -> ModuleFigures:
    gram_a = _gram(block.T for block in data.float_columns(pair.a))
    gram_b = _gram(data.float_rows(pair.b))
    module = description.modules[pair.module]
    square = float(np.vdot(gram_a, gram_b))
    return ModuleFigures(
        module.name,
        module.layer,
        pair.rank,
        pair.scale,
        a_norm=math.sqrt(float(np.trace(gram_a))),
        b_norm=math.sqrt(float(np.trace(gram_b))),
        # rounding may leave a product of near-orthogonal factors just below zero
        update_norm=abs(pair.scale) * math.sqrt(0.0 if square < 0 else square),
        base_norm=module.norm,
    )


def _gram(blocks: Iterable[np.ndarray]) -> np.ndarray:
    """Sum of X^T X over blocks X [n, rank]; its trace is finite only if every value is."""
    total: np.ndarray | None = None
    for block in blocks:
        exact = block.astype(np.float64)
        gram = exact.T @ exact
        total = gram if total is None else total + gram
    return np.zeros((0, 0)) if total is None else total


def _judge(modules: list[ModuleFigures], found: FindingList) -> None:
    broken = [m.module for m in modules if not m.finite]
    if broken:
        found.add("non_finite",
                  f"NaN or infinity in {clip_names(broken)}; the training diverged",
                  modules=len(broken))  # fmt: skip
    idle = [m.module for m in modules if m.finite and m.update_norm == 0]
    if len(idle) == len(modules):
        found.add("zero_effect",
                  "every update is zero (B, A or the scale is): the adapter would answer exactly "
                  "as the base does; was it saved before training?")  # fmt: skip
    elif idle:
        found.add("module_without_effect", f"no effect on {clip_names(idle)}", modules=len(idle))
    for figures in modules:
        if figures.finite and figures.ratio > LARGE_UPDATE:
            found.add("large_update",
                      f"the update of {figures.module} is {figures.ratio:.2f} times its weight",
                      figures.module, ratio=round(figures.ratio, 4))  # fmt: skip


def _compare_base(
    data: TensorData, weight: PlannedBaseWeight, description: ModelDescription, found: FindingList
) -> None:
    module, tensor = description.modules[weight.module], weight.tensor
    norm = math.sqrt(sum(_square(block) for block in data.float_rows(tensor)))
    if not math.isfinite(norm):
        found.add("non_finite", f"NaN or infinity in {tensor.name}", module.name, modules=1)
        return
    distance = abs(norm - module.norm) / max(module.norm, 1e-30)
    if module.sketch:
        sketch = _sketch(data, tensor)
        distance = sketch_distance(sketch, module.sketch, module.norm)
    limit = EDGE_TOLERANCE if module.target in EDGE_TARGETS else BLOCK_TOLERANCE
    if distance > limit:
        found.add("base_weight_differs",
                  f"{tensor.name} differs from this base's weight by {distance:.1%} (at most "
                  f"{limit:.0%}): it was trained, or belongs to another base",
                  module.name, distance=round(distance, 4))  # fmt: skip


def _square(block: np.ndarray) -> float:
    return float(np.sum(np.square(block, dtype=np.float64)))


def _sketch(data: TensorData, tensor: TensorInfo) -> tuple[float, ...]:
    rows, columns = tensor.shape
    return weight_sketch(data.float_rows(tensor), rows, columns)
