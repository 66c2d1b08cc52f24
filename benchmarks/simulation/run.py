"""One run: a list of timed requests through EngineCore on a simulated clock.

The loop is the engine's own step loop with time that jumps: take what has arrived, step, and when
a step ran nothing, move on to whatever happens next.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.bench.outcomes import Outcome
from app.bench.workloads import TimedRequest
from benchmarks.simulation.adapters import HOST_RESIDENT, SimulatedLoader, StoreSpeed
from benchmarks.simulation.calibration import calibrated
from benchmarks.simulation.executor import SimulatedExecutor
from benchmarks.simulation.step_models import Device
from engine.clock import SimulatedClock
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import EngineError
from engine.types import (
    AdapterRef,
    GenerateRequest,
    LatencyBudget,
    RequestOutput,
    SamplingParams,
)

IDLE_POLL_MS = 2.0
"""How often the engine looks again while adapters are on their way and nothing can run."""
LEAST_WAIT_MS = 1e-6  # the clock never stands still, whatever rounding says
PROMPT_FILLER = list(range(100, 100 + 16_384))


def engine_config(device: Device, **changes: Any) -> EngineConfig:
    """The engine's settings for a device; the rest are the defaults."""
    return EngineConfig(Path("simulated.gguf"), **(device.settings | changes))


@dataclass(frozen=True, slots=True)
class Sample:
    """The engine at one moment."""

    at_ms: float
    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_cached: int
    adapters_on_device: int
    adapters_on_host: int
    device_adapter_bytes: int
    host_adapter_bytes: int


@dataclass(slots=True)
class RunResult:
    """Everything a run showed. `end_ms`: when the last request ended."""

    outcomes: list[Outcome]
    end_ms: float
    samples: list[Sample]
    steps: int
    step_times_ms: list[float]
    copied_bytes: int
    loads: int
    preemptions: int
    most_distinct: int  # adapters in one step
    leftovers: list[str] = field(default_factory=list)  # what was not given back at the end


class StuckSimulation(Exception):
    """The engine has work that nothing will move on."""


class Simulation:
    """`speed`: how fast the store is. `noise`: of step times, as a share."""

    def __init__(
        self,
        device: Device,
        config: EngineConfig,
        requests: Sequence[TimedRequest],
        *,
        speed: StoreSpeed = HOST_RESIDENT,
        noise: float = 0.03,
        seed: int = 0,
        sample_every_ms: float = 1000.0,
    ) -> None:
        self._requests = requests
        self._clock = SimulatedClock()
        self._refs = {r.adapter: _ref(r) for r in requests if r.adapter >= 0}
        ranks = {self._refs[r.adapter]: r.rank for r in requests if r.adapter >= 0}
        answers = [request.output_tokens for request in requests]
        self.executor = SimulatedExecutor(device, self._clock, answers, noise=noise, seed=seed)
        self.loader = SimulatedLoader(self._clock, ranks, device.rank_bytes, speed)
        times = calibrated(device, config, noise=noise, seed=seed)
        self.core = EngineCore(config, self.executor, self.loader, self._clock, times)
        self._vocab = device.description.vocab_size
        self._outcomes: list[Outcome] = []
        self._samples: list[Sample] = []
        self._sample_every_ms = sample_every_ms
        self._sample_due_ms = 0.0

    def run(self, limit_ms: float = math.inf) -> RunResult:
        """To the end of the last request, or to `limit_ms`: what still runs then is cancelled.

        Raises StuckSimulation when the engine has work that does not move on for a minute.
        """
        arrived, moved_ms = 0, 0.0
        while arrived < len(self._requests) or self.core.has_work:
            now_ms = self._clock.now_ms()
            if now_ms >= limit_ms:
                self._cancel_all()
                arrived = len(self._requests)
            while arrived < len(self._requests) and self._requests[arrived].at_ms <= now_ms:
                self._submit(arrived)
                arrived += 1
            outputs = self.core.step()
            self._take(outputs)
            self._sample()
            if outputs or self._clock.now_ms() > now_ms:
                moved_ms = self._clock.now_ms()
                continue
            self._wait(arrived)
            if self.core.has_work and self._clock.now_ms() - moved_ms > 60_000.0:
                raise StuckSimulation(f"nothing has moved since {moved_ms:.0f} ms")
        return self._result()

    # ------------------------------------------------------------------ requests

    def _submit(self, index: int) -> None:
        timed = self._requests[index]
        budget = timed.budget
        adapter = self._refs[timed.adapter] if timed.adapter >= 0 else None
        outcome = Outcome(
            tenant=f"t{timed.tenant:03}",
            adapter="" if adapter is None else f"a{timed.adapter:04}",
            sent_ms=timed.at_ms,
            asked_tokens=timed.prompt_tokens + timed.output_tokens,
            budget=budget,
        )
        self._outcomes.append(outcome)
        request = GenerateRequest(
            request_id=str(index),
            tenant=outcome.tenant,
            prompt=self._prompt(index, timed.prompt_tokens),
            sampling=SamplingParams(max_tokens=timed.max_tokens, seed=index),
            cache_salt=outcome.tenant,
            adapter=adapter,
            budget=LatencyBudget(budget.ttft_ms, budget.tpot_ms, budget.percentile),
        )
        try:
            self.core.submit(request)
        except EngineError as error:
            outcome.refused = error.code
            outcome.done = True

    def _prompt(self, index: int, tokens: int) -> list[int]:
        """No two prompts share a block."""
        return [index % self._vocab, index // self._vocab, *PROMPT_FILLER][:tokens]

    def _take(self, outputs: Sequence[RequestOutput]) -> None:
        now_ms = self._clock.now_ms()
        for output in outputs:
            outcome = self._outcomes[int(output.request_id)]
            count = len(output.token_ids) + (output.stop_token is not None)
            if count:
                outcome.take(now_ms, count)
            if output.finish is not None:
                outcome.done = True
                if output.error_code is not None or output.finish == "cancelled":
                    outcome.refused = output.error_code or "cancelled"

    def _cancel_all(self) -> None:
        for index, outcome in enumerate(self._outcomes):
            if not outcome.done:
                self.core.cancel(str(index))

    # ------------------------------------------------------------------ time

    def _wait(self, arrived: int) -> None:
        """Nothing ran: on to the next event, looking again now and then if there is work."""
        now_ms = self._clock.now_ms()
        events = [self.loader.next_ms, self.executor.next_copy_ms]
        if arrived < len(self._requests):
            events.append(self._requests[arrived].at_ms)
        if self.core.has_work:
            events.append(now_ms + IDLE_POLL_MS)
        if math.isfinite(next_ms := min(events)):
            self._clock.advance(max(LEAST_WAIT_MS, next_ms - now_ms))

    def _sample(self) -> None:
        now_ms = self._clock.now_ms()
        if now_ms < self._sample_due_ms:
            return
        self._sample_due_ms = now_ms + self._sample_every_ms
        status = self.core.status()
        on_device = [a for a in status.adapters if a.tier == "device"]
        self._samples.append(
            Sample(
                at_ms=now_ms,
                running=status.running,
                waiting=status.waiting,
                kv_blocks_used=status.kv_blocks_used,
                kv_blocks_cached=status.kv_blocks_cached,
                adapters_on_device=len(on_device),
                adapters_on_host=sum(a.tier == "host" for a in status.adapters),
                device_adapter_bytes=status.device_adapter_bytes,
                host_adapter_bytes=status.host_adapter_bytes,
            )
        )

    # ------------------------------------------------------------------ the end

    def _result(self) -> RunResult:
        status = self.core.status()
        leftovers = [f"request {i} never ended" for i, o in enumerate(self._outcomes) if not o.done]
        if status.kv_blocks_used:
            leftovers.append(f"{status.kv_blocks_used} KV blocks are still referenced")
        leftovers += [
            f"adapter {a.adapter.digest[:8]} has {a.pins} pins" for a in status.adapters if a.pins
        ]
        if not self.executor.empty:
            leftovers.append("the device still knows a sequence")
        return RunResult(
            outcomes=self._outcomes,
            end_ms=self._clock.now_ms(),
            samples=self._samples,
            steps=status.steps,
            step_times_ms=self.executor.step_times_ms,
            copied_bytes=self.executor.copied_bytes,
            loads=self.loader.loads,
            preemptions=status.preemptions_total,
            most_distinct=self.executor.most_distinct,
            leftovers=leftovers,
        )


def _ref(request: TimedRequest) -> AdapterRef:
    digest = hashlib.sha256(f"adapter {request.adapter}".encode()).hexdigest()
    return AdapterRef(f"t{request.tenant:03}", digest)
