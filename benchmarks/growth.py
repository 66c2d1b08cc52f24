"""How the cost of serving grows: with registered adapters, and with what is in a batch.

    python -m benchmarks.growth [--quick] [--output growth.json] [--axes registered adapters ...]

Axis `registered` starts an engine in a process of its own over a store of 16 up to 2,000 adapters
(rank 8 on q_proj and v_proj, each a file of its own, in a temporary folder) and sends it requests
whose adapters follow Zipf's law: time from start to the first token, resident memory, output tokens
a second. The engines take turns, round by round.

The other axes time decode steps of one executor, each point in turn in every round: distinct
`adapters` in a batch, `rank`, `batch` (every row its own adapter), `context`. Keys and values are
not computed first: a step reads as many bytes of them whatever they hold.

Prints a table and writes JSON; figures are medians over rounds, and beside each its ratio to the
axis's first point. Times by the clock need a quiet machine; CPU times and ratios are for others.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.packaged import packaged_base_model
from engine.adapters.loader import StoreLoader
from engine.adapters.store import open_store
from engine.clock import SystemClock
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.runner import CpuExecutor
from engine.types import (
    BLOCK_TOKENS,
    LAYER_TARGETS,
    AdapterBlob,
    AdapterRef,
    GenerateRequest,
    PlanRow,
    SamplingParams,
    SequenceStart,
    StepPlan,
)
from tests.adapter_files import good_adapter
from tests.model_factories import read_blob

SALT = "5a" * 16
SMALL = ("q_proj", "v_proj")
REGISTERED = (16, 125, 500, 2000)
ADAPTERS = (1, 2, 4, 8, 16, 32, 64)
RANKS = (8, 16, 32, 64, 128, 256)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 256, 512, 1024, 2048)
AXES = ("registered", "adapters", "rank", "batch", "context")
IN_FLIGHT, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 32, 16


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured. `--quick` is for a look, and for the test of this command."""

    rounds: int
    requests: int
    steps: int
    registered: tuple[int, ...]
    adapters: tuple[int, ...]
    ranks: tuple[int, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]


FULL = Size(3, 128, 10, REGISTERED, ADAPTERS, RANKS, BATCHES, CONTEXTS)
QUICK = Size(1, 32, 3, (16, 64), (1, 8), (8, 32), (1, 8), (128, 512))


@dataclass(frozen=True, slots=True)
class Figure:
    """A point of an axis; medians over rounds."""

    axis: str
    point: int
    ratio: float  # of `tokens_per_cpu_s`, to the axis's first point
    tokens_per_s: float
    tokens_per_cpu_s: float
    start_s: float | None = None  # from the first line of the engine's code to its first token
    start_cpu_s: float | None = None
    resident_mib: float | None = None


# --------------------------------------------------------------------------- registered adapters


def fill_store(url: str, base: Path, folder: Path, count: int) -> list[AdapterRef]:
    """Random adapters of rank 8, each of its own bytes; about a megabyte each."""
    config = EngineConfig(base_model=base, data_dir=folder, arena_bytes=64 << 20)
    description, store = CpuExecutor(config).description, open_store(url)
    each = 8 * 2 * sum(m.in_features + m.out_features for m in description.modules
                       if m.target in SMALL)  # fmt: skip
    free = shutil.disk_usage(folder).free
    if free < 1.5 * count * each:
        raise SystemExit(f"{count} adapters take {count * each >> 20} MiB; {free >> 20} are free")
    refs = []
    for index in range(count):
        staging = store.stage()
        files = good_adapter(description, rank=8, seed=index, targets=SMALL, dtype="BF16")
        assert files.config is not None
        assert files.weights is not None
        staging.write_config(files.config)
        staging.write_weights(files.weights)
        refs.append(staging.commit(SALT).ref)
    return refs


def serve_registered(arguments: argparse.Namespace) -> None:
    """The process of one engine: prints its figures as JSON."""
    began, began_cpu = time.perf_counter(), time.process_time()
    refs = [AdapterRef(*ref) for ref in json.loads(arguments.refs.read_text())]
    refs = refs[: arguments.registered]
    config = EngineConfig(
        base_model=arguments.base, data_dir=arguments.data, store_url=arguments.store,
        arena_bytes=512 << 20, threads=arguments.threads, prefix_caching=False,
    )  # fmt: skip
    executor = CpuExecutor(config)
    loader = StoreLoader(config, open_store(config.store_url), executor.description)
    core = EngineCore(config, executor, loader, SystemClock())
    rng, vocabulary = random.Random(arguments.seed), executor.description.vocab_size
    weights = [1 / (rank + 1) for rank in range(len(refs))]
    chosen = iter(rng.choices(refs, weights, k=arguments.requests + 1))
    number = iter(range(1 << 30))

    def submit() -> None:
        index = next(number)
        core.submit(
            GenerateRequest(
                request_id=f"r{index}", tenant=f"t{index % 16}",
                prompt=[rng.randrange(1, vocabulary) for _ in range(PROMPT_TOKENS)],
                sampling=SamplingParams(
                    max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True
                ),
                cache_salt="growth", adapter=next(chosen),
            )
        )  # fmt: skip

    def run(requests: int) -> Iterator[int]:
        """Keeps IN_FLIGHT requests under way; yields the tokens of each step."""
        waiting, running = requests, 0
        while waiting or running:
            while waiting and running < IN_FLIGHT:
                submit()
                waiting, running = waiting - 1, running + 1
            tokens = 0
            for output in core.step():
                assert output.error_code is None, output
                tokens += len(output.token_ids)
                running -= output.usage is not None
            yield tokens

    start: tuple[float, float] | None = None
    for tokens in run(1):
        if tokens and start is None:
            start = (time.perf_counter() - began, time.process_time() - began_cpu)
    assert start is not None
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = sum(run(arguments.requests))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    loader.close()
    print(
        json.dumps(
            {
                "start_s": start[0],
                "start_cpu_s": start[1],
                "tokens_per_s": tokens / wall,
                "tokens_per_cpu_s": tokens / cpu,
                "resident_mib": resident_bytes() / 2**20,
            }
        )
    )


def resident_bytes() -> int:
    """This process's resident memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure_registered(size: Size, base: Path, threads: int) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory(prefix="loramux-growth-") as scratch:
        folder = Path(scratch)
        url = f"file://{folder / 'store'}"
        refs = fill_store(url, base, folder, max(size.registered))
        (folder / "refs.json").write_text(json.dumps([[ref.salt, ref.digest] for ref in refs]))
        found: dict[int, list[dict[str, float]]] = {count: [] for count in size.registered}
        for round_number in range(size.rounds):
            for count in _turn(size.registered, round_number):
                command = (
                    *(sys.executable, "-m", "benchmarks.growth", "--base", base),
                    *("--registered", count, "--refs", folder / "refs.json", "--store", url),
                    *("--data", folder, "--requests", size.requests, "--seed", round_number),
                    *("--threads", threads),
                )
                told = subprocess.run([*map(str, command)], check=True, stdout=subprocess.PIPE)
                found[count].append(json.loads(told.stdout))
    for count, runs in found.items():
        medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        yield Figure("registered", count, 0.0, **medians)


# --------------------------------------------------------------------------- decode steps


@dataclass(frozen=True, slots=True)
class Point:
    """A batch of decodes. Row i uses adapter i modulo `adapters`; 0: the base model."""

    axis: str
    value: int
    batch: int
    adapters: int
    rank: int
    context: int


class Steps:
    """One executor, and the adapters of the point at hand."""

    def __init__(self, base: Path, data_dir: Path, threads: int, arena_bytes: int) -> None:
        config = EngineConfig(
            base_model=base, data_dir=data_dir, arena_bytes=arena_bytes, threads=threads
        )
        self._executor = CpuExecutor(config)
        self._folder = data_dir / "adapter"
        self._next_seq = self._step = 0

    def time(self, point: Point, steps: int) -> tuple[float, float]:
        """Seconds of a step, by the clock and of the CPU: medians after two steps of warm-up."""
        executor, description = self._executor, self._executor.description
        top = executor.extent_count
        blobs = self._blobs(point.rank)
        for slot in range(point.adapters):
            blob = blobs[slot % len(blobs)]  # copied, so that each row reads bytes of its own
            top -= -(-blob.layout.nbytes // description.kv_block_bytes)
            executor.start_copy(slot, top, blob)
            assert executor.poll_copies(blob.layout.nbytes) == [slot]
        per_row = -(-(point.context + steps + 3) // BLOCK_TOKENS)
        assert per_row * point.batch <= top, "the arena is too small"
        first, self._next_seq = self._next_seq, self._next_seq + point.batch
        spent = [self._decode(point, first, per_row, index) for index in range(steps + 2)]
        self._run(StepPlan(self._step, list(range(first, self._next_seq)), [], [], []))
        for slot in range(point.adapters):
            executor.drop_adapter(slot)
        wall, cpu = zip(*spent[2:], strict=True)
        return statistics.median(wall), statistics.median(cpu)

    def _blobs(self, rank: int) -> list[AdapterBlob]:
        description, blobs = self._executor.description, []
        for seed in range(2):
            files = good_adapter(
                description, rank=rank, seed=seed, targets=LAYER_TARGETS, dtype="BF16"
            )
            blobs.append(read_blob(files.write(self._folder), description))
        return blobs

    def _decode(self, point: Point, first: int, per_row: int, index: int) -> tuple[float, float]:
        started, rows = [], []
        for row in range(point.batch):
            seq, blocks = first + row, list(range(row * per_row, (row + 1) * per_row))
            if index == 0:
                prompt = [1] * (point.context + 1)
                sampling = SamplingParams(max_tokens=1 << 20, temperature=0.0, ignore_eos=True)
                started.append(SequenceStart(seq, prompt, [], sampling, 0))
            slot = row % point.adapters if point.adapters else -1
            new = blocks if index == 0 else []
            rows.append(PlanRow(seq, point.context + index, [1 + row], new, slot, True))
        return self._run(StepPlan(self._step, [], started, [], rows))

    def _run(self, plan: StepPlan) -> tuple[float, float]:
        self._step += 1
        wall, cpu = time.perf_counter(), time.process_time()
        self._executor.execute(plan)
        return time.perf_counter() - wall, time.process_time() - cpu


def points(size: Size) -> list[Point]:
    """Of every axis but `registered`. One that is not varied: batch 32 (16 for contexts), 16
    adapters (4 for ranks), rank 8, context 256."""
    most = max(size.batches)
    return [
        *(Point("adapters", n, most, n, 8, 256) for n in size.adapters),
        *(Point("rank", n, min(most, 32), 4, n, 256) for n in size.ranks),
        *(Point("batch", n, n, n, 8, 256) for n in size.batches),
        *(Point("context", n, min(most, 16), min(most, 16), 8, n) for n in size.contexts),
    ]


def measure_steps(
    size: Size, base: Path, threads: int, axes: tuple[str, ...], arena_bytes: int = 3 << 30
) -> Iterator[Figure]:
    wanted = [point for point in points(size) if point.axis in axes]
    found: dict[Point, list[tuple[float, float]]] = {point: [] for point in wanted}
    with tempfile.TemporaryDirectory(prefix="loramux-growth-") as scratch:
        steps = Steps(base, Path(scratch), threads, arena_bytes)
        for round_number in range(size.rounds):
            for point in _turn(wanted, round_number):
                found[point].append(steps.time(point, size.steps))
    for point, spent in found.items():
        wall, cpu = (statistics.median(values) for values in zip(*spent, strict=True))
        yield Figure(point.axis, point.value, 0.0, point.batch / wall, point.batch / cpu)


def _turn(these: Any, round_number: int) -> list[Any]:
    """There and back again, so that a machine that slows down slows all alike."""
    return list(these) if round_number % 2 == 0 else list(reversed(these))


# --------------------------------------------------------------------------- the command


def with_ratios(figures: list[Figure]) -> list[dict[str, Any]]:
    first: dict[str, float] = {}
    rows = []
    for figure in figures:
        base = first.setdefault(figure.axis, figure.tokens_per_cpu_s)
        rows.append(asdict(figure) | {"ratio": figure.tokens_per_cpu_s / base})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["axis        point  tokens/s  per CPU s  ratio  start s  start CPU s  resident MiB"]
    for row in rows:
        line = (
            f"{row['axis']:<10} {row['point']:>6} {row['tokens_per_s']:>9.1f} "
            f"{row['tokens_per_cpu_s']:>10.1f} {row['ratio']:>6.3f}"
        )
        if row["start_s"] is not None:
            line += f" {row['start_s']:>8.2f} {row['start_cpu_s']:>12.2f}"
            line += f" {row['resident_mib']:>13.0f}"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, default=None)
    parser.add_argument("--axes", nargs="+", choices=AXES, default=AXES)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--output", type=Path)
    for name, kind in (("registered", int), ("requests", int), ("seed", int), ("refs", Path),
                       ("data", Path), ("store", str)):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.base = arguments.base or packaged_base_model()
    if arguments.registered:
        serve_registered(arguments)
        return
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    size, axes = QUICK if arguments.quick else FULL, tuple(arguments.axes)
    figures: list[Figure] = []
    if "registered" in axes:
        figures += measure_registered(size, arguments.base, arguments.threads)
    if set(axes) != {"registered"}:
        figures += measure_steps(size, arguments.base, arguments.threads, axes)
    rows = with_ratios(figures)
    print(table(rows))
    if arguments.output:
        arguments.output.write_text(json.dumps({"machine": os.cpu_count(), "figures": rows}))


if __name__ == "__main__":
    main()
