"""Plots are drawn without a display, also where there is little to draw."""

from pathlib import Path

import pytest

from app.bench.outcomes import Outcome
from app.bench.plots import PlotsUnavailable, Run, Timeline, draw_plots
from app.bench.report import summarise

PNG = b"\x89PNG\r\n\x1a\n"


def run(*, answered: int, refused: int, timeline: Timeline | None = None) -> Run:
    outcomes = []
    for index in range(answered + refused):
        made = Outcome(f"t{index % 3}", "a", 100.0 * index, 50, done=True)
        if index < answered:
            made.take(100.0 * index + 20.0)
            made.take(100.0 * index + 30.0)
        else:
            made.refused = "queue_full"
        outcomes.append(made)
    return Run(outcomes, summarise(outcomes, 1.0), timeline)


def drawn(folder: Path, runs: dict[str, Run]) -> set[str]:
    pytest.importorskip("matplotlib")
    written = draw_plots(folder, runs)
    assert all(path.read_bytes().startswith(PNG) for path in written)
    return {path.name for path in written}


def test_every_figure_of_a_simulated_run(tmp_path: Path) -> None:
    timeline = Timeline([0.0, 1000.0], {"running": [0.0, 3.0], "waiting": [1.0, 0.0]})
    runs = {
        "vtc": run(answered=6, refused=2, timeline=timeline),
        "fcfs": run(answered=3, refused=0),
    }
    names = {"latencies.png", "goodput.png", "tenants.png", "refusals.png", "residency.png"}
    assert drawn(tmp_path / "plots", runs) == names


def test_a_run_in_which_nothing_was_answered(tmp_path: Path) -> None:
    assert "residency.png" not in drawn(tmp_path, {"down": run(answered=0, refused=4)})


def test_no_request_at_all(tmp_path: Path) -> None:
    assert len(drawn(tmp_path, {"empty": run(answered=0, refused=0)})) == 4


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(PlotsUnavailable, match="pip install matplotlib"):
        draw_plots(tmp_path, {"x": run(answered=1, refused=0)})
