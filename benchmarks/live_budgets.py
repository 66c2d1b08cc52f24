"""Latency budgets on this machine: the real engine, the embedded model, one thread, real time.

    python -m benchmarks.live_budgets                       all figures, five rounds each
    python -m benchmarks.live_budgets --figure cold-stream --rounds 3 --json build/live.json

The arms of a figure take turns, round by round, in changing order, on the same requests; each
figure takes under seven minutes. Rates are shares of what the engine finished of the same workload
when it was saturated, just before. A second core is for the loads from the store.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from app.bench.outcomes import Outcome
from app.bench.workloads import NO_BUDGET, Budget, Lengths, TimedRequest, Workload, generate
from benchmarks.arguments import at_least_one, positive
from benchmarks.live.engine import LiveEngine, LiveResult, StepRecord
from benchmarks.packaged import packaged_base_model
from benchmarks.simulation.experiment import Experiment, Figures, Finding, print_experiment

PROMPT, OUTPUT = Lengths(24, 0.5, 8, 64), Lengths(10, 0.4, 4, 20)
KV_BLOCKS = 1500
PLACES = (4, 8, 16)  # for adapters, where twice as many are wanted
FIRST_VISITOR = 1000  # numbers of adapters that are not a workload's own
REPEATS = 24  # steps that hold the same, a batch
POLICY = "slo"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bench:
    """What every figure is given."""

    base: Path
    folder: Path
    rounds: int
    seconds: float  # of arrivals, of one arm in one round
    load: float = 0.8  # share of capacity, where adapters are twice what fits

    def engine(self, name: str, **settings: object) -> LiveEngine:
        return LiveEngine(self.base, self.folder / name, **settings)

    def traffic(self, workload: Workload, rate: float, seed: int) -> list[TimedRequest]:
        return generate(workload, rate_per_s=rate, duration_ms=1000.0 * self.seconds, seed=seed)


# --------------------------------------------------------------------------- adapters


def twice_what_fits(bench: Bench) -> list[Finding]:
    """Rank-16 adapters, uniform popularity, steady load: as many as fit, and twice as many.

    With 16 places there are about twice as many as requests run, with 4 half as many: then the
    batch itself wants more adapters at once than there are places.
    """
    figures = Figures()
    probe = bench.engine("probe")
    with closing(probe):
        block_bytes = probe.description.kv_block_bytes
        modules = [m for m in probe.description.modules if m.layer >= 0]
    adapter_bytes = 16 * 2 * sum(m.in_features + m.out_features for m in modules)
    extents = -(-adapter_bytes // block_bytes) + 1
    for fits in PLACES:
        total = fits * extents + KV_BLOCKS
        engine = bench.engine(
            f"twice-{fits}",
            arena_bytes=total * block_bytes,
            adapter_share=(fits * extents + 0.5) / total,
        )
        with closing(engine):
            _once_and_twice(bench, engine, fits, figures)
    return figures.findings()


def _once_and_twice(bench: Bench, engine: LiveEngine, fits: int, figures: Figures) -> None:
    label = f"{fits} fit"
    base = Workload(
        "uniform", adapters=fits, tenants=fits, ranks=(16,), prompt=PROMPT, output=OUTPUT
    )
    rate = bench.load * _capacity(engine, base)
    for seed in range(1, bench.rounds + 1):
        arms: dict[int, LiveResult] = {}
        for count in _turns(seed, (fits, 2 * fits)):
            workload = replace(base, adapters=count, tenants=count)
            engine.run(_visits(workload))
            arms[count] = engine.run(bench.traffic(workload, rate, seed))
        once, twice = (_answered(arms[count]) for count in (fits, 2 * fits))
        ratio = _median(o.ttft_ms for o in twice) / _median(o.ttft_ms for o in once)
        tpots = [o.tpot_ms for o in twice if o.tpot_ms is not None]
        tail = float(np.percentile(tpots, 99)) / statistics.median(tpots)
        rows = statistics.fmean(s.shape.decode_rows for s in arms[2 * fits].steps)
        figures.note(POLICY, f"{label}: decodes in a step, twice as many", rows)
        figures.note(POLICY, f"{label}: TTFT p50, as many as fit", _median(o.ttft_ms for o in once))
        figures.note(POLICY, f"{label}: TTFT p50, twice as many", _median(o.ttft_ms for o in twice))
        figures.at_most(POLICY, f"{label}: TTFT p50, twice / as many", ratio, 1.5)
        figures.at_most(POLICY, f"{label}: TPOT p99 / p50, twice", tail, 3.0)
    figures.note(POLICY, f"{label}: taken off the device", engine.core.status().evictions_total)


def _visits(workload: Workload) -> list[TimedRequest]:
    """Every adapter once, so that what fits is on the device."""
    return [
        TimedRequest(0.0, workload.tenant_of(a), a, workload.rank_of(a), 8, 1, 1)
        for a in range(workload.adapters)
    ]


# --------------------------------------------------------------------------- tenants


def polite_beside_flood(bench: Bench) -> list[Finding]:
    """A tenant at a tenth of the capacity, alone and beside one that sends ten times as much."""
    figures = Figures()
    base = Workload(
        "uniform", adapters=2, tenants=1, ranks=(16,),
        prompt=Lengths(16, 0.4, 8, 32), output=Lengths(6, 0.3, 3, 10),
    )  # fmt: skip
    with closing(bench.engine("flood", arena_bytes=1 << 30)) as engine:
        rate = 0.1 * _capacity(engine, base)
        decode_ms = _decode_ms(engine)
        budget = Budget(ttft_ms=40 * decode_ms, tpot_ms=5 * decode_ms)
        workload = replace(base, budgets=(budget,))
        alone: list[Outcome] = []
        beside: list[Outcome] = []
        steps: list[StepRecord] = []
        for seed in range(1, bench.rounds + 1):
            polite = bench.traffic(workload, rate, seed)
            flood = [
                replace(r, tenant=1, adapter=r.adapter + 2)
                for r in bench.traffic(workload, 10 * rate, 1000 + seed)
            ]
            both = sorted([*polite, *flood], key=lambda r: r.at_ms)
            for arm in _turns(seed, ("alone", "beside")):
                result = engine.run(polite if arm == "alone" else both)
                theirs = [o for o in result.outcomes if o.tenant == "t000"]
                (alone if arm == "alone" else beside).extend(theirs)
                if arm == "beside":
                    steps += result.steps
                    good = statistics.fmean(o.good_at_end for o in theirs) if theirs else 1.0
                    figures.note(POLICY, "polite: in time, by round", good)
        step_ms = float(np.percentile([s.actual_ms for s in steps], 99))
        p99s = [float(np.percentile([o.ttft_ms or 0.0 for o in a], 99)) for a in (alone, beside)]
        attained = statistics.fmean(o.good_at_end for o in beside)
        figures.note(POLICY, "budgets: first token, a token", budget.ttft_ms or 0.0)
        figures.note(POLICY, "polite requests, all rounds", len(beside))
        figures.at_least(POLICY, "polite: in time, all rounds", attained, budget.percentile)
        figures.note(POLICY, "polite: TTFT p99 alone", p99s[0])
        figures.note(POLICY, "polite: TTFT p99 beside", p99s[1])
        figures.note(POLICY, "loaded step p99", step_ms)
        figures.at_most(
            POLICY, "(TTFT p99 beside - alone) / loaded step p99",
            (p99s[1] - p99s[0]) / step_ms, 2.0,
        )  # fmt: skip
    return figures.findings()


# --------------------------------------------------------------------------- cold adapters


def cold_stream(bench: Bench) -> list[Finding]:
    """Warm tenants at half of the capacity, while requests for ever new rank-64 adapters come."""
    figures = Figures()
    base = Workload("uniform", adapters=4, tenants=4, ranks=(16,), prompt=PROMPT, output=OUTPUT)
    with closing(bench.engine("cold", arena_bytes=1 << 30)) as engine:
        rate = 0.5 * _capacity(engine, base)
        workload = replace(base, budgets=(Budget(None, 4 * _decode_ms(engine)),))
        visitor = base.tenants
        engine.run(_visits(base))
        fresh = FIRST_VISITOR
        for seed in range(1, bench.rounds + 1):
            mine = bench.traffic(workload, rate, seed)
            visits = [
                TimedRequest(1000.0 * s + 500.0, visitor, -1, 64, 8, 1, 1, NO_BUDGET)
                for s in range(int(bench.seconds))
            ]
            cold = [replace(v, adapter=fresh + n) for n, v in enumerate(visits)]
            known = [replace(v, adapter=FIRST_VISITOR - 1 - n % 2) for n, v in enumerate(visits)]
            fresh += len(cold)
            engine.run([replace(v, at_ms=0.0) for v in known[:2]])
            arms = {"nobody": mine, "resident": _merge(mine, known), "cold": _merge(mine, cold)}
            for requests in arms.values():
                engine.store_adapters(requests)
            gaps: dict[str, float] = {}
            for arm in _turns(seed, tuple(arms)):
                result = engine.run(arms[arm])
                warm = [o for o in result.outcomes if o.tenant != f"t{visitor:03}"]
                gaps[arm] = float(np.percentile(np.concatenate([o.gaps_ms for o in warm]), 99))
            for arm in arms:
                figures.note(POLICY, f"warm: gap p99, visitors: {arm}", gaps[arm])
            figures.at_most(POLICY, "cold / nobody", gaps["cold"] / gaps["nobody"], 1.3)
            figures.note(POLICY, "cold / the same resident", gaps["cold"] / gaps["resident"])
    return figures.findings()


# --------------------------------------------------------------------------- predictions


def step_prediction(bench: Bench) -> list[Finding]:
    """Mixed traffic: how far a step's prediction was off, and how far equal steps differ."""
    figures = Figures()
    workload = Workload(
        "uniform", adapters=6, tenants=6, ranks=(8, 16, 64), prompt=Lengths(48, 0.8, 8, 256),
        output=OUTPUT, budgets=(NO_BUDGET,),
    )  # fmt: skip
    with closing(bench.engine("steps", arena_bytes=1 << 30)) as engine:
        rate = 0.7 * _capacity(engine, workload)
        for seed in range(1, bench.rounds + 1):
            repeats = [
                _repeat_errors(engine.run(_equal_requests(rows)).steps, rows) for rows in (1, 4, 8)
            ]
            steps = engine.run(bench.traffic(workload, rate, seed)).steps
            errors = [abs(s.predicted_ms / s.actual_ms - 1.0) for s in steps if s.predicted_ms]
            repeat = float(np.percentile(np.concatenate(repeats), 90))
            p90 = float(np.percentile(errors, 90))
            figures.note(POLICY, "steps", len(errors))
            figures.note(POLICY, "prediction error p50", float(np.percentile(errors, 50)))
            figures.note(POLICY, "prediction error p90", p90)
            figures.note(POLICY, "repeat error p90 of equal steps", repeat)
            figures.at_most(POLICY, "p90 beyond the repeat error", p90 - repeat, 0.15)
    return figures.findings()


def _equal_requests(rows: int) -> list[TimedRequest]:
    return [TimedRequest(0.0, 0, -1, 0, 16, REPEATS, REPEATS) for _ in range(rows)]


def _repeat_errors(steps: Sequence[StepRecord], rows: int) -> list[float]:
    """Of steps of so many decodes, how far each is from the median of its neighbours."""
    times = [s.actual_ms for s in steps if s.shape.decode_rows == rows == s.shape.tokens]
    return [
        abs(times[n] / statistics.median(times[max(0, n - 4) : n + 5]) - 1.0)
        for n in range(len(times))
    ]


# --------------------------------------------------------------------------- parts


def _turns(seed: int, arms: tuple[T, ...]) -> tuple[T, ...]:
    return arms if seed % 2 else arms[::-1]


def _merge(*lists: Sequence[TimedRequest]) -> list[TimedRequest]:
    return sorted((r for requests in lists for r in requests), key=lambda r: r.at_ms)


def _answered(result: LiveResult) -> list[Outcome]:
    return [outcome for outcome in result.outcomes if outcome.answered]


def _median(values: Iterable[float | None]) -> float:
    return statistics.median(value for value in values if value is not None)


def _capacity(engine: LiveEngine, workload: Workload, count: int = 24) -> float:
    """Requests per second of a saturated engine: so many at once, without budgets."""
    some = generate(
        replace(workload, budgets=(NO_BUDGET,)), rate_per_s=1000.0, duration_ms=1e6, seed=99
    )
    engine.run(_visits(workload))
    began_s = time.perf_counter()
    engine.run([replace(request, at_ms=0.0) for request in some[:count]])
    return count / (time.perf_counter() - began_s)


def _decode_ms(engine: LiveEngine) -> float:
    """A decode step of one row."""
    steps = engine.run(_equal_requests(1)).steps
    return statistics.median(s.actual_ms for s in steps if s.shape.tokens == 1)


FIGURES: dict[str, tuple[str, Callable[[Bench], list[Finding]]]] = {
    "adapters-twice-what-fits": (
        "does latency survive twice as many adapters as fit on the device?",
        twice_what_fits,
    ),
    "polite-beside-flood": (
        "does a tenant notice another one at ten times its share?",
        polite_beside_flood,
    ),
    "cold-stream": ("do warm tenants notice cold rank-64 adapters streaming in?", cold_stream),
    "step-prediction": ("how well is a step's time predicted?", step_prediction),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.live_budgets",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--figure", nargs="+", choices=list(FIGURES), default=list(FIGURES))
    parser.add_argument("--rounds", type=at_least_one, default=5)
    parser.add_argument("--seconds", type=positive, default=12.0, help="of arrivals, of one arm")
    parser.add_argument(
        "--load", type=positive, default=0.8, help="where adapters are twice what fits"
    )
    parser.add_argument("--base", type=Path, default=packaged_base_model())
    parser.add_argument("--json", type=Path, help="write every figure here")
    arguments = parser.parse_args(argv)
    results: dict[str, object] = {}
    for name in arguments.figure:
        question, measure = FIGURES[name]
        began_s = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(
                arguments.base, Path(folder), arguments.rounds, arguments.seconds, arguments.load
            )
            findings = measure(bench)
        print_experiment(print, name, Experiment(question, lambda setting: []), findings)
        print(f"{time.perf_counter() - began_s:.0f} s", flush=True)
        results[name] = [
            {"figure": f.figure, "values": f.values, "median": f.median, "holds": f.holds}
            for f in findings
        ]
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
