"""What a named comparison is: arms that take turns over seeds, figures with a bound, a verdict."""

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from app.bench.tables import print_table
from engine.policy import PolicyName


@dataclass(frozen=True, slots=True)
class Setting:
    """How much of an experiment to run: so many seeds from the first, arms by policy, seconds of
    arrivals."""

    rounds: int
    policies: Sequence[PolicyName]
    seconds: float | None = None
    first_seed: int = 1

    @property
    def seeds(self) -> range:
        return range(self.first_seed, self.first_seed + self.rounds)

    def duration_ms(self, usual_s: float) -> float:
        return 1000.0 * (self.seconds or usual_s)


@dataclass(frozen=True, slots=True)
class Finding:
    """One figure over all rounds, and the bound that its median has to keep."""

    policy: str
    figure: str
    values: list[float]
    sense: Literal["at most", "at least", ""] = ""
    bound: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def holds(self) -> bool | None:
        if self.bound is None:
            return None
        return self.median <= self.bound if self.sense == "at most" else self.median >= self.bound


class Figures:
    """Collects figures round by round."""

    def __init__(self) -> None:
        self._values: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        self._bounds: dict[str, tuple[Literal["at most", "at least"], float]] = {}

    def at_most(self, policy: str, figure: str, value: float, bound: float) -> None:
        self._bounds[figure] = ("at most", bound)
        self.note(policy, figure, value)

    def at_least(self, policy: str, figure: str, value: float, bound: float) -> None:
        self._bounds[figure] = ("at least", bound)
        self.note(policy, figure, value)

    def note(self, policy: str, figure: str, value: float) -> None:
        self._values[policy, figure].append(value)

    def findings(self) -> list[Finding]:
        return [
            Finding(policy, figure, values, *self._bounds.get(figure, ("", None)))
            for (policy, figure), values in self._values.items()
        ]


@dataclass(frozen=True, slots=True)
class Experiment:
    """`question` in a sentence; `run` answers it."""

    question: str
    run: Callable[[Setting], list[Finding]]
    policies: tuple[PolicyName, ...] = field(default=("slo", "vtc", "fcfs"))


def print_experiment(
    show: Callable[[str], object], name: str, experiment: Experiment, findings: Sequence[Finding]
) -> None:
    show(f"{name}: {experiment.question}")
    rows = []
    for finding in findings:
        bound = "" if finding.bound is None else f"{finding.sense} {finding.bound:.4g}"
        holds = {True: "yes", False: "NO", None: ""}[finding.holds]
        spread = f"{min(finding.values):.4g} .. {max(finding.values):.4g}"
        label = f"{finding.policy:5}{finding.figure}"
        rows.append((label, f"{finding.median:.4g}", spread, bound, holds))
    heads = ("policy, figure", "median", "least .. most", "bound", "holds")
    print_table(show, heads, rows)


def write_findings(path: Path, name: str, findings: Sequence[Finding]) -> None:
    rows = [asdict(f) | {"median": f.median, "holds": f.holds} for f in findings]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"experiment": name, "findings": rows}, indent=1) + "\n")
