"""Where the time of a step goes on this CPU: the engine's executor on the packaged base model.

    python -m benchmarks.step_profile [--threads 2] [--rounds 15] [--base FILE]

Decodes at contexts 160 and 16 (the difference is attention) and a prompt of 256 tokens, without
adapters and with those of the reference workload (rows take them in turn; a lone row has rank 8, a
prompt rank 16). A step is its layers, its logits, its draws, and the rest, which is Python. The
cases take turns, round by round: the least by the clock, and its parts in that step.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.arguments import at_least_one
from benchmarks.packaged import packaged_base_model
from benchmarks.step_roofline import PROMPT, PROMPT_RANK, REFERENCE_RANKS
from engine.config import EngineConfig
from engine.runner import CpuExecutor
from engine.types import Executor
from tests.adapter_files import good_adapter
from tests.model_factories import read_blob
from tests.parity.driver import Driver, Piece

PARTS = ("layers", "logits", "draws")
PROMPTS_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Case:
    """`ranks`: of the adapters that the rows take in turn; none: the base model."""

    title: str
    rows: int
    tokens: int  # of each row
    context: int
    ranks: tuple[int, ...] = ()


CASES = (
    Case("1 row", 1, 1, 160),
    Case("1 row, context 16", 1, 1, 16),
    Case("1 row, adapter of rank 8", 1, 1, 160, (8,)),
    Case("4 rows", 4, 1, 160),
    Case("32 rows", 32, 1, 160),
    Case("32 rows, context 16", 32, 1, 16),
    Case("32 rows, 16 adapters", 32, 1, 160, REFERENCE_RANKS),
    Case(f"prompt of {PROMPT}", 1, PROMPT, 0),
    Case(f"prompt of {PROMPT}, rank {PROMPT_RANK}", 1, PROMPT, 0, (PROMPT_RANK,)),
)


@dataclass(frozen=True, slots=True)
class Spent:
    """Milliseconds of one step, and of its parts."""

    step_ms: float
    parts: dict[str, float]


class TimedDriver(Driver):
    """The executor with its own sampler; `spent`: milliseconds of each part of the last step."""

    def _open(self, config: EngineConfig) -> Executor:
        self.spent = dict.fromkeys(PARTS, 0.0)
        executor = CpuExecutor(config)
        # private names, so that the product carries no clocks
        self._time(executor._model, "forward", "layers")
        self._time(executor._model, "logits", "logits")
        self._time(executor._sampler, "sample", "draws")
        return executor

    def _time(self, of: object, name: str, part: str) -> None:
        timed: Callable[..., Any] = getattr(of, name)

        def call(*arguments: Any) -> Any:
            began_s = time.perf_counter()
            result = timed(*arguments)
            self.spent[part] += 1000.0 * (time.perf_counter() - began_s)
            return result

        setattr(of, name, call)

    def _logits(self, seqs: list[int]) -> list[Tensor]:
        return []


class Profile:
    def __init__(self, base: Path, folder: Path, threads: int) -> None:
        self._driver = TimedDriver(
            base, folder, linear_path="auto", kv_dtype="auto", adapter_dtype="auto",
            threads=threads, arena_bytes=1 << 30, max_batch_tokens=1024,
        )  # fmt: skip
        self._next_seq = 0
        description = self._driver.executor.description
        rng = np.random.default_rng(0)
        self._tokens = rng.integers(5, description.vocab_size, 4096).tolist()
        for slot, rank in enumerate(REFERENCE_RANKS):
            files = good_adapter(description, rank=rank, dtype="BF16").write(folder / f"a{slot}")
            self._driver.add_adapter(slot, read_blob(files, description))

    def step(self, case: Case) -> Spent:
        """One step of fresh sequences."""
        seqs = range(self._next_seq, self._next_seq + case.rows)
        self._next_seq += case.rows
        rows = list(zip(seqs, _slots(case), strict=True))
        for at in range(0, case.rows if case.context else 0, PROMPTS_AT_ONCE):
            self._driver.feed(*(
                Piece(seq, self._some(seq, case.context), slot)
                for seq, slot in rows[at : at + PROMPTS_AT_ONCE]
            ))  # fmt: skip
        pieces = [Piece(seq, self._some(seq + 7, case.tokens), slot) for seq, slot in rows]
        self._driver.spent = dict.fromkeys(PARTS, 0.0)
        began_s = time.perf_counter()
        self._driver.feed(*pieces)
        step_ms = 1000.0 * (time.perf_counter() - began_s)
        self._driver.close_all()
        return Spent(step_ms, dict(self._driver.spent))

    def _some(self, seq: int, count: int) -> list[int]:
        """Tokens of its own for each sequence."""
        start = 31 * seq % (len(self._tokens) - count)
        return self._tokens[start : start + count]


def _slots(case: Case) -> list[int]:
    """Of the rows' adapters; -1: the base model."""
    if not case.ranks:
        return [-1] * case.rows
    if len(case.ranks) == 1:
        return [REFERENCE_RANKS.index(case.ranks[0])] * case.rows
    return [row % len(case.ranks) for row in range(case.rows)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_profile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--base", type=Path, default=packaged_base_model())
    parser.add_argument("--threads", type=at_least_one, default=2)
    parser.add_argument("--rounds", type=at_least_one, default=15)
    wanted = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        profile = Profile(wanted.base, Path(folder), wanted.threads)
        spent: dict[str, list[Spent]] = {case.title: [] for case in CASES}
        for _ in range(wanted.rounds):
            for case in CASES:
                spent[case.title].append(profile.step(case))
    print(f"| ms, {wanted.threads} threads | step | median | " + " | ".join(PARTS) + " | rest |")
    print("|---" * (4 + len(PARTS)) + "|")
    for title, steps in spent.items():
        least = min(steps, key=lambda step: step.step_ms)
        median = statistics.median(step.step_ms for step in steps)
        rest = least.step_ms - sum(least.parts.values())
        figures = [least.step_ms, median, *least.parts.values(), rest]
        print(f"| {title} | " + " | ".join(f"{figure:.1f}" for figure in figures) + " |")


if __name__ == "__main__":
    main()
