"""An Executor that computes no logits: it says how long a step takes and moves the clock by it.

Adapters arrive over a bus, one after another. On a device with copies beside the steps they go on
while steps run and take their part of the memory's bandwidth; otherwise they take their turn
between steps, at most so many bytes at once, and the clock waits for them.
"""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from benchmarks.simulation.step_models import Device, StepContents
from engine.clock import SimulatedClock
from engine.types import (
    AdapterBlob,
    ModelDescription,
    PlanRow,
    RowResult,
    StepPlan,
    StepResult,
)

FILLER = 7
"""The token of every answer before its end."""


@dataclass(slots=True)
class _Copy:
    slot: int
    left_bytes: float
    ready_ms: float = math.inf


@dataclass(slots=True)
class _Resident:
    rank: int
    nbytes: int


class SimulatedExecutor:
    """`answer_tokens[sampling.seed]` says how long an answer is; it ends with the end token."""

    def __init__(
        self,
        device: Device,
        clock: SimulatedClock,
        answer_tokens: list[int],
        *,
        noise: float = 0.0,
        seed: int = 0,
    ) -> None:
        """`noise`: standard deviation of a step's time, as a share of it."""
        self._device = device
        self._model = device.steps
        self._clock = clock
        self._answer_tokens = answer_tokens
        self._noise = noise
        self._rng = np.random.default_rng(seed)
        self._left: dict[int, int] = {}  # tokens of the answer to come, by sequence
        self._slots: dict[int, _Resident] = {}
        self._copies: deque[_Copy] = deque()
        self._bus_free_ms = 0.0
        self._moved_bytes = 0
        self.busy_ms = 0.0
        self.copied_bytes = 0
        self.step_times_ms: list[float] = []
        self.most_distinct = 0

    @property
    def description(self) -> ModelDescription:
        return self._device.description

    @property
    def extent_count(self) -> int:
        return self._device.extents

    # ------------------------------------------------------------------ steps

    def execute(self, plan: StepPlan) -> StepResult:
        for seq in plan.closed:
            self._left.pop(seq, None)
        for start in plan.started:
            tokens = self._answer_tokens[start.sampling.seed]
            self._left[start.seq] = tokens - len(start.generated)
        if not plan.rows:  # sequences were closed: nothing is launched
            return StepResult(plan.step, [], 0.0)
        contents = self._contents(plan)
        duration_ms = self._model.step_ms(contents, copying=self._copying)
        if self._noise:
            duration_ms *= max(0.5, 1.0 + self._noise * float(self._rng.standard_normal()))
        self._clock.advance(duration_ms)
        self.busy_ms += duration_ms
        self.step_times_ms.append(duration_ms)
        return StepResult(plan.step, [self._result(row) for row in plan.rows], duration_ms)

    @property
    def _copying(self) -> bool:
        return self._model.copies_beside_steps and self._bus_free_ms > self._clock.now_ms()

    def _contents(self, plan: StepPlan) -> StepContents:
        block_bytes = self._device.description.kv_block_bytes
        step = StepContents(moved_bytes=self._moved_bytes + len(plan.copies) * block_bytes)
        self._moved_bytes = 0
        touched = set()
        for row in plan.rows:
            count = len(row.tokens)
            end = row.start + count
            pairs = count * (row.start + end + 1) // 2
            if count == 1 and row.sample:
                step.decode_rows += 1
            else:
                step.prefill_tokens += count
                step.prefill_pairs += pairs
            step.sampled_rows += row.sample
            step.kv_tokens += end
            step.attention_pairs += pairs
            if row.slot >= 0:
                touched.add(row.slot)
                step.token_ranks += count * self._slots[row.slot].rank
        step.adapter_bytes = sum(self._slots[slot].nbytes for slot in touched)
        self.most_distinct = max(self.most_distinct, len(touched))
        return step

    def _result(self, row: PlanRow) -> RowResult:
        if not row.sample:
            return RowResult(row.seq, [])
        self._left[row.seq] -= 1
        last = self._left[row.seq] <= 0
        return RowResult(row.seq, [self.description.eos_token_ids[0] if last else FILLER])

    # ------------------------------------------------------------------ adapters

    def start_copy(self, slot: int, first_extent: int, blob: AdapterBlob) -> None:
        nbytes = blob.layout.nbytes
        self._slots[slot] = _Resident(blob.layout.max_rank, nbytes)
        copy = _Copy(slot, nbytes)
        if self._model.copies_beside_steps:
            start_ms = max(self._clock.now_ms(), self._bus_free_ms)
            self._bus_free_ms = start_ms + nbytes / self._model.bus_bytes_per_ms
            copy.ready_ms = self._bus_free_ms
        self._copies.append(copy)
        self.copied_bytes += nbytes

    def poll_copies(self, max_bytes: int) -> list[int]:
        ready = []
        if not self._model.copies_beside_steps:
            self._copy_now(max_bytes)
        while self._copies and self._copies[0].ready_ms <= self._clock.now_ms():
            ready.append(self._copies.popleft().slot)
        return ready

    def _copy_now(self, max_bytes: float) -> None:
        for copy in self._copies:
            count = min(copy.left_bytes, max_bytes)
            self._clock.advance(count / self._model.bus_bytes_per_ms)
            copy.left_bytes -= count
            max_bytes -= count
            if copy.left_bytes > 0:
                return
            copy.ready_ms = self._clock.now_ms()

    def move_adapter(self, slot: int, first_extent: int) -> None:
        self._moved_bytes += self._slots[slot].nbytes

    def drop_adapter(self, slot: int) -> None:
        self._slots.pop(slot, None)
        self._copies = deque(copy for copy in self._copies if copy.slot != slot)

    # ------------------------------------------------------------------ for the simulation

    @property
    def next_copy_ms(self) -> float:
        """When the next adapter will have arrived; infinity when none is on its way."""
        return self._copies[0].ready_ms if self._copies else math.inf

    @property
    def empty(self) -> bool:
        """Whether no sequence is known; `plan.closed` of a last step may still be due."""
        return not self._left
