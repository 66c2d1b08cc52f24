"""Figures, ratios and the printed table of one run."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.peers_parts.workload import SCENARIOS, Scenario

OURS = "loramux"
Key = tuple[str, str]
"""A scenario's name and a peer's."""


@dataclass(frozen=True)
class Run:
    """One scenario of one peer in one round. `first_s`: the same request with one output token."""

    round: int
    scenario: str
    peer: str
    requests: int
    tokens: int  # output tokens of all requests
    wall_s: float
    cpu_s: float
    first_s: float | None = None

    @property
    def tokens_s(self) -> float:
        """Output tokens a second; of a request alone, after its first token."""
        if self.first_s is None:
            return self.tokens / self.wall_s
        return (self.tokens - 1) / (self.wall_s - self.first_s)

    @property
    def cost_s(self) -> float:
        return self.wall_s + (self.first_s or 0.0)


@dataclass(frozen=True)
class Spread:
    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))

    def text(self, digits: int) -> str:
        if self.least == self.most:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ({self.least:.{digits}f} .. {self.most:.{digits}f})"


@dataclass(frozen=True)
class Figures:
    """One peer in one scenario. The ratios are loramux's speed / this peer's, round by round."""

    rounds: int
    tokens_s: Spread
    tokens_cpu_s: Spread  # output tokens a second of processor time, prompts included
    token_ms: Spread | None  # of a request alone: between two of its tokens
    first_ms: Spread | None  # of a request alone: up to its first token
    ratio: Spread | None  # by the clock
    cpu_ratio: Spread | None  # by processor time


def figures(runs: Iterable[Run]) -> dict[Key, Figures]:
    """By scenario and peer, in the order of the first runs."""
    by_key: dict[Key, dict[int, Run]] = {}
    for run in runs:
        by_key.setdefault((run.scenario, run.peer), {})[run.round] = run
    return {key: _figures(rounds, by_key.get((key[0], OURS), {})) for key, rounds in by_key.items()}


def _figures(theirs: Mapping[int, Run], ours: Mapping[int, Run]) -> Figures:
    runs = list(theirs.values())
    alone = all(run.first_s is not None for run in runs)
    both = [(ours[number], run) for number, run in theirs.items() if number in ours]
    ratios = [mine.tokens_s / their.tokens_s for mine, their in both]
    cpu_ratios = [their.cpu_s / mine.cpu_s for mine, their in both]
    return Figures(
        rounds=len(runs),
        tokens_s=Spread.of([run.tokens_s for run in runs]),
        tokens_cpu_s=Spread.of([run.tokens / run.cpu_s for run in runs]),
        token_ms=Spread.of([1000 / run.tokens_s for run in runs]) if alone else None,
        first_ms=Spread.of([1000 * (run.first_s or 0.0) for run in runs]) if alone else None,
        ratio=Spread.of(ratios) if ratios else None,
        cpu_ratio=Spread.of(cpu_ratios) if cpu_ratios else None,
    )


def too_costly(costs: Mapping[Key, float], rounds: int, seconds_left: float) -> set[Key]:
    """What has to be left out of the rounds to come so that they end in time: dearest first."""
    out: set[Key] = set()
    for key in sorted(costs, key=lambda key: costs[key], reverse=True):
        if rounds * sum(cost for other, cost in costs.items() if other not in out) <= seconds_left:
            break
        out.add(key)
    return out


def table(by_key: Mapping[Key, Figures], scenarios: Sequence[Scenario] = SCENARIOS) -> list[str]:
    """Lines of a Markdown table for each kind of scenario."""
    lines: list[str] = []
    for alone in (False, True):
        speed = "ms a token | first token ms" if alone else "output tokens/s"
        lines += [
            "",
            f"| | {speed} | tokens / CPU s | loramux / it | the same by CPU | rounds |",
            "|---|---" + "|---" * (5 if alone else 4) + "|",
        ]
        for scenario in scenarios:
            if scenario.alone != alone:
                continue
            for (name, peer), figure in by_key.items():
                if name == scenario.name:
                    lines.append(_row(f"{scenario.title}: {peer}", figure, peer == OURS))
    return lines


def _row(title: str, figure: Figures, ours: bool) -> str:
    if figure.token_ms is not None and figure.first_ms is not None:
        speed = [figure.token_ms.text(1), figure.first_ms.text(0)]
    else:
        speed = [figure.tokens_s.text(1)]
    ratios = ["", ""]
    if not ours and figure.ratio is not None and figure.cpu_ratio is not None:
        ratios = [figure.ratio.text(2), figure.cpu_ratio.text(2)]
    cells = [title, *speed, figure.tokens_cpu_s.text(1), *ratios, str(figure.rounds)]
    return "| " + " | ".join(cells) + " |"


def as_document(runs: Sequence[Run], **facts: Any) -> dict[str, Any]:
    """The run as JSON: `facts`, the figures by scenario and peer, and every single run."""
    by_scenario: dict[str, dict[str, Any]] = {}
    for (scenario, peer), figure in figures(runs).items():
        by_scenario.setdefault(scenario, {})[peer] = asdict(figure)
    return {**facts, "figures": by_scenario, "runs": [asdict(run) for run in runs]}
