"""Traffic through the real scheduler, policy, pool, arena and blocks on a simulated clock.

    python -m benchmarks.simulate --workload zipf --adapters 2000 --load 0.8 --policy vtc fcfs
    python -m benchmarks.simulate --workload identical uniform zipf distinct --ranks 8 16 64 mix \\
        --adapters 1 8 100 2000 --load 0.5 0.8 1.2 --seconds 5
    python -m benchmarks.simulate --experiment prompt-jam --rounds 5

Options that take several values are crossed. The device is an H200 with an 8B model in int4 (a
roofline), or a JSON file of measured step times. Every run is reproducible by its seed.
"""

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args, get_type_hints

from app.bench.plots import PlotsUnavailable, draw_plots
from app.bench.report import Report
from app.bench.tables import print_reports, write_json
from app.bench.workloads import NO_BUDGET, POPULARITIES, RANKS, Budget, Jam, Workload, generate
from benchmarks.arguments import at_least_one, positive
from benchmarks.simulation.adapters import HOST_RESIDENT, StoreSpeed
from benchmarks.simulation.capacity import measured_capacity
from benchmarks.simulation.experiment import Setting, print_experiment, write_findings
from benchmarks.simulation.experiments import EXPERIMENTS
from benchmarks.simulation.run import engine_config
from benchmarks.simulation.step_models import GB, Device, h200, measured_device
from benchmarks.simulation.trial import Trial, run_trial
from engine.config import EngineConfig

POLICIES: tuple[str, ...] = get_args(get_type_hints(EngineConfig)["policy"])
SECONDS = 30.0
BUDGETS = (Budget(500.0, 30.0), Budget(2000.0, 60.0), NO_BUDGET)
"""Tenants in turn: interactive, relaxed, none."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the matrix."""

    workload: Workload
    load: float
    label: str


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    if arguments.experiment is not None:
        experiment = EXPERIMENTS[arguments.experiment]
        arms = arguments.policy or list(experiment.policies)
        findings = experiment.run(
            Setting(arguments.rounds, arms, arguments.seconds, arguments.seed)
        )
        print_experiment(print, arguments.experiment, experiment, findings)
        if arguments.json is not None:
            write_findings(arguments.json, arguments.experiment, findings)
        return
    device = _device(arguments.device, arguments.arena_gb)
    policies = arguments.policy or [POLICIES[0]]
    started_s = time.process_time()
    trials: dict[str, Trial] = {}
    simulated_ms = 0.0
    for cell in _cells(arguments):
        config = engine_config(device)
        capacity = arguments.capacity or measured_capacity(device, config, cell.workload)
        rate = cell.load * capacity
        requests = generate(
            cell.workload,
            rate_per_s=rate,
            duration_ms=1000.0 * (arguments.seconds or SECONDS),
            seed=arguments.seed,
        )
        for policy in policies:
            trial = run_trial(
                device, requests, policy=policy, seed=arguments.seed, speed=_speed(arguments)
            )
            trials[f"{policy} {cell.label}"] = trial
            simulated_ms += trial.result.end_ms
            print(f"{policy} {cell.label}: goodput {trial.report.goodput:.3f}", flush=True)
    reports: dict[str, Report] = {label: trial.report for label, trial in trials.items()}
    print_reports(print, reports)
    cpu_s = time.process_time() - started_s
    print(f"{simulated_ms / 1000:.0f} s simulated in {cpu_s:.1f} CPU s, capacity included")
    if arguments.json is not None:
        write_json(
            arguments.json, reports, seed=arguments.seed, seconds=arguments.seconds or SECONDS
        )
    if arguments.plots is not None:
        try:
            draw_plots(arguments.plots, {label: t.plotted() for label, t in trials.items()})
        except PlotsUnavailable as error:
            raise SystemExit(str(error)) from error


def _cells(arguments: argparse.Namespace) -> Iterator[Cell]:
    for popularity, ranks, adapters, load in itertools.product(
        arguments.workload, arguments.ranks, arguments.adapters, arguments.load
    ):
        workload = Workload(
            popularity,
            adapters=adapters,
            tenants=arguments.tenants,
            ranks=RANKS[ranks],
            cv=arguments.cv,
            budgets=BUDGETS,
            flood=arguments.flood,
            jam=Jam() if arguments.jam else None,
        )
        yield Cell(workload, load, f"{popularity} r{ranks} x{adapters} @{load:g}")


def _device(name: str, arena_gb: float | None) -> Device:
    if name == "h200":
        return h200() if arena_gb is None else h200(arena_gb * GB)
    try:
        device = measured_device(Path(name))
    except (OSError, ValueError) as error:
        raise SystemExit(f"--device: {error}") from error
    return device if arena_gb is None else device.with_arena(arena_gb * GB)


def _speed(arguments: argparse.Namespace) -> StoreSpeed:
    return StoreSpeed() if arguments.cold_store else HOST_RESIDENT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--experiment", choices=list(EXPERIMENTS), help="one named comparison instead")
    add(
        "--rounds", type=at_least_one, default=5, help="of an experiment: seeds SEED, SEED + 1, ..."
    )
    add("--workload", nargs="+", choices=POPULARITIES, default=["zipf"])
    add("--ranks", nargs="+", choices=list(RANKS), default=["mix"])
    add("--adapters", nargs="+", type=at_least_one, default=[100])
    add("--load", nargs="+", type=positive, default=[0.8], help="share of the measured capacity")
    add("--capacity", type=positive, help="requests/s at load 1, instead of measuring them")
    add("--policy", nargs="+", choices=POLICIES, help=f"default: {POLICIES[0]}")
    add("--tenants", type=at_least_one, default=20)
    add("--cv", type=positive, default=1.0, help="of the gaps: 1 Poisson, 4 bursty")
    add("--flood", type=positive, default=1.0, help="tenant 0 sends so many times its share")
    add("--jam", action="store_true", help="ten 4k prompts land together every 20 s")
    add("--seconds", type=positive, help="of arrivals, on the simulated clock; default: 30")
    add("--seed", type=int, default=1)
    add("--device", default="h200", help="h200, or a JSON file of measured step times")
    add("--arena-gb", type=positive, help="KV cache and adapters together")
    add("--cold-store", action="store_true", help="adapters start in the store, not on the host")
    add("--json", type=Path, help="write every figure here")
    add("--plots", type=Path, help="write PNG plots into this folder")
    return parser


if __name__ == "__main__":
    main()
