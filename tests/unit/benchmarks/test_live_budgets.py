"""`python -m benchmarks.live_budgets`: the real engine on a tiny model, in real time."""

import json
from pathlib import Path

import pytest

from app.bench.workloads import NO_BUDGET, Budget, TimedRequest
from benchmarks.live.engine import LiveEngine
from benchmarks.live_budgets import FIGURES, main
from tests.model_factories import make_llama, save_folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(make_llama(num_hidden_layers=1), tmp_path_factory.mktemp("base"))


def request(at_ms: float, adapter: int, rank: int, budget: Budget = NO_BUDGET) -> TimedRequest:
    return TimedRequest(at_ms, 0, adapter, rank, 8, 3, 3, budget)


def test_timed_requests_are_answered_by_adapters_of_the_store(base: Path, tmp_path: Path) -> None:
    engine = LiveEngine(base, tmp_path, arena_bytes=8 << 20, calibration_ms=50.0)
    requests = [request(0.0, 0, 4), request(1.0, 1, 4), request(30.0, 2, 8), request(30.0, -1, 0)]
    result = engine.run(requests)
    assert [(o.tokens, o.answered) for o in result.outcomes] == [(3, True)] * 4
    assert {len(o.gaps_ms) for o in result.outcomes} == {2}
    assert min(o.first_ms or 0.0 for o in result.outcomes[2:]) > 30.0
    assert len({a.adapter.digest for a in engine.core.status().adapters}) == 3
    assert {s.shape.adapter_bytes > 0 for s in result.steps} >= {True}
    assert all(s.actual_ms > 0.0 for s in result.steps)
    engine.close()


def test_an_arrival_that_a_step_held_up_has_waited_since_its_own_time(
    base: Path, tmp_path: Path
) -> None:
    engine = LiveEngine(base, tmp_path, arena_bytes=8 << 20, calibration_ms=50.0)
    engine.run([TimedRequest(0.0, 0, -1, 0, 8, 40, 40)])  # nobody is refused by fewer steps
    late, hopeless = (
        engine.run([request(-10_000.0, -1, 0, Budget(ttft_ms=budget))]).outcomes[0]
        for budget in (3_600_000.0, 9_000.0)
    )
    assert (late.ttft_ms or 0.0) > 10_000.0
    assert not hopeless.answered
    assert hopeless.first_ms is None
    engine.close()


@pytest.mark.wide
def test_a_figure_is_measured_and_held_against_its_bound(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "live.json"
    figure = "--figure step-prediction --rounds 1 --seconds 0.3"
    main(f"--base {base} {figure} --json {path}".split())
    (figures,) = json.loads(path.read_text()).values()
    bounded = [f for f in figures if f["holds"] is not None]
    assert [f["figure"] for f in bounded] == ["p90 beyond the repeat error"]
    assert FIGURES["step-prediction"][0] in capsys.readouterr().out
