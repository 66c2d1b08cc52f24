"""The real engine in this process: base model, store of random adapters, one thread.

The loop is the engine's own step loop with a list of timed requests instead of clients; loads from
the store run in their own threads, as they do in an engine process.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.bench.outcomes import Outcome
from app.bench.workloads import TimedRequest
from engine.adapters.loader import StoreLoader
from engine.adapters.store import open_store
from engine.calibration import calibrate
from engine.clock import SystemClock
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import EngineError
from engine.runner import CpuExecutor
from engine.step_time import StepShape, StepTimes
from engine.types import (
    AdapterRef,
    GenerateRequest,
    LatencyBudget,
    ModelDescription,
    RequestOutput,
    SamplingParams,
)
from tests.adapter_files import good_adapter

IDLE_S = 0.001
"""Pause of the loop when nothing ran."""
MOST_S = 120.0
"""After which a run that does not end is given up."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: what it held, what was predicted for it before it ran, what it took (ms)."""

    shape: StepShape
    predicted_ms: float
    actual_ms: float


class RecordingStepTimes(StepTimes):
    """Keeps every step beside what was predicted for it."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[StepRecord] = []

    def observe(self, shape: StepShape, actual_ms: float) -> None:
        if shape.tokens:
            self.records.append(StepRecord(shape, self.mean_ms(shape), actual_ms))
        super().observe(shape, actual_ms)


@dataclass(slots=True)
class LiveResult:
    """What one run showed, as the callers saw it, and the steps that it took."""

    outcomes: list[Outcome]
    steps: list[StepRecord] = field(default_factory=list)


class LiveEngine:
    """`settings`: of the engine. Adapter a of rank r is made when it is first asked for."""

    def __init__(self, base: Path, folder: Path, **settings: Any) -> None:
        self.config = EngineConfig(
            base_model=base,
            data_dir=folder,
            store_url=f"file://{folder / 'store'}",
            threads=1,
            **settings,
        )
        self._store = open_store(self.config.store_url)
        self._clock = SystemClock()
        self.times = RecordingStepTimes()
        executor = CpuExecutor(self.config, self._clock)
        self.description: ModelDescription = executor.description
        self._loader = StoreLoader(self.config, self._store, executor.description)
        self.core = EngineCore(self.config, executor, self._loader, self._clock, self.times)
        self._files: dict[int, bytes] = {}  # weights by rank
        self._refs: dict[tuple[int, int], AdapterRef] = {}
        self._runs = 0
        calibrate(self.core, self._clock, self.config.calibration_ms)

    def close(self) -> None:
        self._loader.close()

    def store_adapters(self, requests: Iterable[TimedRequest]) -> None:
        """Puts every adapter that the requests name into the store, as uploads would."""
        for request in requests:
            key = (request.adapter, request.rank)
            if request.adapter < 0 or key in self._refs:
                continue
            rank = request.rank
            if rank not in self._files:
                files = good_adapter(self.description, rank=rank, dtype="BF16")
                self._files[rank] = files.weights or b""
            # another alpha makes another adapter: its digest covers the config
            alpha = 0.001 * (1 + request.adapter)
            config = good_adapter(
                self.description, rank=rank, layers=(), config={"lora_alpha": alpha}
            ).config
            staging = self._store.stage()
            staging.write_config(config or b"")
            staging.write_weights(self._files[rank])
            self._refs[key] = staging.commit("5a" * 16).ref

    def run(self, requests: Sequence[TimedRequest], *, seed: int = 0) -> LiveResult:
        """Open loop: each request goes in at its time, whatever the engine does; to the end.

        Raises TimeoutError when it has not ended in `MOST_S` after the last arrival.
        """
        self.store_adapters(requests)
        self._runs += 1
        first_step = len(self.times.records)
        outcomes: list[Outcome] = []
        began_s, arrived = time.perf_counter(), 0
        last_ms = max((request.at_ms for request in requests), default=0.0)
        while arrived < len(requests) or self.core.has_work:
            now_ms = 1000.0 * (time.perf_counter() - began_s)
            if now_ms > last_ms + 1000.0 * MOST_S:
                raise TimeoutError(f"requests have not ended {MOST_S:.0f} s after the last one")
            while arrived < len(requests) and requests[arrived].at_ms <= now_ms:
                outcomes.append(self._submit(arrived, requests[arrived], now_ms, seed))
                arrived += 1
            steps = len(self.times.records)
            outputs = self.core.step()
            self._take(outputs, outcomes, 1000.0 * (time.perf_counter() - began_s))
            if not outputs and len(self.times.records) == steps:
                time.sleep(IDLE_S)
        return LiveResult(outcomes, self.times.records[first_step:])

    def _submit(self, index: int, timed: TimedRequest, now_ms: float, seed: int) -> Outcome:
        """An arrival that a step held up has waited since its own time."""
        outcome = Outcome(
            tenant=f"t{timed.tenant:03}",
            adapter="" if timed.adapter < 0 else f"a{timed.adapter:04}",
            sent_ms=timed.at_ms,
            asked_tokens=timed.prompt_tokens + timed.output_tokens,
            budget=timed.budget,
        )
        budget, unique = timed.budget, 7919 * (index + 1) + 104_729 * (seed + self._runs)
        request = GenerateRequest(
            request_id=f"{self._runs}-{index}",
            tenant=outcome.tenant,
            prompt=[
                (unique + 31 * n) % self.description.vocab_size for n in range(timed.prompt_tokens)
            ],
            sampling=SamplingParams(
                max_tokens=timed.output_tokens, temperature=0.0, ignore_eos=True
            ),
            cache_salt=f"{self._runs}-{index}",  # nothing is met in the prefix cache
            adapter=self._refs[timed.adapter, timed.rank] if timed.adapter >= 0 else None,
            budget=LatencyBudget(budget.ttft_ms, budget.tpot_ms, budget.percentile),
            waited_ms=now_ms - timed.at_ms,
        )
        try:
            self.core.submit(request)
        except EngineError as error:
            outcome.refused, outcome.done = error.code, True
        return outcome

    @staticmethod
    def _take(outputs: list[RequestOutput], outcomes: list[Outcome], now_ms: float) -> None:
        for output in outputs:
            outcome = outcomes[int(output.request_id.partition("-")[2])]
            outcome.take(now_ms, len(output.token_ids) + (output.stop_token is not None))
            if output.finish is not None:
                outcome.done = True
                outcome.refused = output.error_code or ""
