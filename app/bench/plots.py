"""PNG plots of runs beside each other. matplotlib is loaded only here, without any display."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from app.bench.outcomes import Outcome
from app.bench.report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WINDOWS = 40
"""Pieces of a run over which goodput is shown."""
MOST_TENANTS = 60


class PlotsUnavailable(Exception):
    """matplotlib is not installed."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Curves over a run: milliseconds, and by name as many values."""

    at_ms: list[float]
    curves: dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Run:
    """What the plots show of one run."""

    outcomes: Sequence[Outcome]
    report: Report
    timeline: Timeline | None = None


def draw_plots(folder: Path, runs: Mapping[str, Run]) -> list[Path]:
    """Writes latencies, goodput, tenants, refusals and (if known) residency; their paths.

    Raises PlotsUnavailable without matplotlib.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = [
        _figure(folder / "latencies.png", 2, lambda axes: _latencies(axes, runs)),
        _figure(folder / "goodput.png", 1, lambda axes: _goodput(axes[0], runs)),
        _figure(folder / "tenants.png", 1, lambda axes: _tenants(axes[0], runs)),
        _figure(folder / "refusals.png", 1, lambda axes: _refusals(axes[0], runs)),
    ]
    timelines = {label: run.timeline for label, run in runs.items() if run.timeline is not None}
    if timelines:
        names = list(next(iter(timelines.values())).curves)
        written.append(
            _figure(
                folder / "residency.png",
                len(names),
                lambda axes: _timelines(axes, timelines, names),
            )
        )
    return written


def _figure(path: Path, panels: int, draw: Any) -> Path:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotsUnavailable("plots need matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(6.0 * min(panels, 3), 4.0 * -(-panels // 3)), layout="constrained")
    FigureCanvasAgg(figure)
    columns = min(panels, 3)
    axes = [figure.add_subplot(-(-panels // 3), columns, n + 1) for n in range(panels)]
    draw(axes)
    figure.savefig(path, dpi=110)
    return path


def _latencies(axes: list[Axes], runs: Mapping[str, Run]) -> None:
    """Every percentile from 0 to 99.9, so that medians and tails are on one picture."""
    shares = np.linspace(0, 99.9, 200)
    for ax, name in zip(axes, ("TTFT", "TPOT"), strict=True):
        for label, run in runs.items():
            values = [o.ttft_ms if name == "TTFT" else o.tpot_ms for o in run.outcomes]
            known = [value for value in values if value is not None]
            if known:
                ax.plot(shares, np.percentile(known, shares), label=label)
        ax.set(xlabel="percentile of requests", ylabel=f"{name} (ms)", title=name)
        ax.grid(alpha=0.3)
        if ax.lines:
            ax.set_yscale("log")
            ax.legend()


def _goodput(ax: Axes, runs: Mapping[str, Run]) -> None:
    for label, run in runs.items():
        if not run.outcomes:
            continue
        sent = np.array([o.sent_ms for o in run.outcomes]) / 1000.0
        good = np.array([o.good for o in run.outcomes], dtype=float)
        edges = np.linspace(0.0, max(sent.max(), 1e-3), min(WINDOWS, len(sent)) + 1)
        offered, _ = np.histogram(sent, edges)
        kept, _ = np.histogram(sent, edges, weights=good)
        share = np.divide(kept, offered, out=np.full(len(kept), np.nan), where=offered > 0)
        ax.step(edges[:-1], share, where="post", label=f"{label} ({run.report.goodput:.3f})")
    ax.set(xlabel="sent at (s)", ylabel="good / offered", title="Goodput", ylim=(-0.02, 1.05))
    ax.grid(alpha=0.3)
    if ax.lines:
        ax.legend()


def _tenants(ax: Axes, runs: Mapping[str, Run]) -> None:
    """Attainment by tenant as points, the promised percentile as a dash."""
    for label, run in runs.items():
        tenants = run.report.tenants[:MOST_TENANTS]
        names = [tenant.tenant for tenant in tenants]
        attained = [np.nan if t.attainment is None else t.attainment for t in tenants]
        ax.plot(names, attained, "o", label=f"{label} (Jain {run.report.jain:.3f})")
    if runs:
        tenants = next(iter(runs.values())).report.tenants[:MOST_TENANTS]
        ax.plot([t.tenant for t in tenants], [t.percentile for t in tenants], "_k", ms=12)
    ax.set(ylabel="inside the budget / answered", title="Attainment by tenant", ylim=(-0.02, 1.05))
    ax.tick_params(axis="x", rotation=90, labelsize=7)
    ax.grid(alpha=0.3)
    if ax.lines:
        ax.legend()


def _refusals(ax: Axes, runs: Mapping[str, Run]) -> None:
    causes = list(Counter(c for run in runs.values() for c in run.report.refused))
    width = 0.8 / max(1, len(runs))
    for number, (label, run) in enumerate(runs.items()):
        at = np.arange(len(causes)) + number * width
        ax.bar(at, [run.report.refused.get(cause, 0) for cause in causes], width, label=label)
    ax.set_xticks(np.arange(len(causes)) + 0.4 - width / 2, causes, rotation=15)
    ax.set(ylabel="requests", title="Not answered, by cause" if causes else "All were answered")
    if causes:
        ax.legend()


def _timelines(axes: list[Axes], timelines: Mapping[str, Timeline], names: list[str]) -> None:
    for ax, name in zip(axes, names, strict=True):
        for label, timeline in timelines.items():
            ax.plot(np.array(timeline.at_ms) / 1000.0, timeline.curves[name], label=label)
        ax.set(xlabel="s", title=name, ylim=(0, None))
        ax.grid(alpha=0.3)
        ax.legend()
