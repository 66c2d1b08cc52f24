"""`python -m benchmarks.simulate`: one command gives lines, JSON and plots."""

import json
from pathlib import Path

import pytest

from benchmarks.simulate import main
from benchmarks.simulation.experiment import Figures, Finding, Setting, print_experiment
from benchmarks.simulation.experiments import EXPERIMENTS


@pytest.fixture
def slow_device(tmp_path: Path) -> Path:
    path = tmp_path / "steps.json"
    path.write_text('{"fixed_ms": 30, "prefill_token_ms": 0.5, "decode_row_ms": 4}')
    return path


def test_several_values_are_crossed_and_every_run_is_reported(
    slow_device: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    main(
        f"--device {slow_device} --workload distinct --ranks 8 --adapters 4 --load 0.5 1.2 "
        f"--capacity 1 --policy vtc fcfs --seconds 6 --json {tmp_path / 'runs.json'} "
        f"--plots {tmp_path / 'plots'}".split()
    )
    document = json.loads((tmp_path / "runs.json").read_text())
    assert len(document["runs"]) == 4
    assert {label.split()[0] for label in document["runs"]} == {"vtc", "fcfs"}
    assert all(run["offered"] > 0 for run in document["runs"].values())
    assert len(list((tmp_path / "plots").glob("*.png"))) == 5
    shown = capsys.readouterr().out
    assert "fcfs distinct r8 x4 @1.2" in shown
    assert "s simulated in" in shown


def test_a_device_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--device"):
        main(["--device", str(tmp_path / "nothing.json")])


def test_the_same_command_gives_the_same_figures(slow_device: Path, tmp_path: Path) -> None:
    documents = []
    for name in ("first", "again"):
        path = tmp_path / f"{name}.json"
        main(f"--device {slow_device} --adapters 3 --capacity 1 --seconds 6 --json {path}".split())
        documents.append(path.read_text())
    assert documents[0] == documents[1]


class TestExperiments:
    def test_an_experiment_writes_its_findings(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "jam.json"
        main(f"--experiment prompt-jam --rounds 1 --policy slo fcfs --json {path}".split())
        findings = json.loads(path.read_text())["findings"]
        ratio = {
            f["policy"]: f["median"] for f in findings if "gap p99" in f["figure"]
        }  # a full chunk against one that fits
        assert ratio["slo"] < 0.5 * ratio["fcfs"]
        assert "prompt-jam" in capsys.readouterr().out

    @pytest.mark.wide
    def test_what_is_admitted_in_an_overload_keeps_its_promise_tenant_by_tenant(self) -> None:
        findings = EXPERIMENTS["overload"].run(Setting(1, ["slo"], first_seed=2))
        kept = {f.figure: f for f in findings if f.policy == "slo"}
        assert kept["tenants that attain their percentile"].holds
        assert kept["goodput"].holds
        assert kept["tokens/s against fcfs"].holds

    def test_the_median_is_held_against_the_bound(self) -> None:
        figures = Figures()
        for value in (0.5, 0.9, 2.0):
            figures.at_most("slo", "ratio", value, 1.0)
            figures.at_least("slo", "share", value, 1.0)
            figures.note("slo", "plain", value)
        ratio, share, plain = figures.findings()
        assert (ratio.median, ratio.holds) == (0.9, True)
        assert (share.median, share.holds) == (0.9, False)
        assert plain.holds is None

    def test_a_bound_that_does_not_hold_is_plain_to_see(self) -> None:
        lines: list[str] = []
        experiment = EXPERIMENTS["prompt-jam"]
        print_experiment(
            lines.append, "x", experiment, [Finding("slo", "a", [3.0], "at most", 1.0)]
        )
        assert lines[-1].endswith("at most 1     NO")

    def test_rounds_are_seeds_from_the_first_on(self) -> None:
        assert list(Setting(3, ["slo"]).seeds) == [1, 2, 3]
        assert list(Setting(2, ["slo"], first_seed=11).seeds) == [11, 12]
        assert Setting(1, ["slo"]).duration_ms(4.0) == 4000.0
        assert Setting(1, ["slo"], seconds=2.0).duration_ms(4.0) == 2000.0
