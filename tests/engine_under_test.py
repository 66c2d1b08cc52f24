"""An EngineCore on fakes and a simulated clock, and what a test does with it."""

from collections.abc import Callable

from engine.clock import SimulatedClock
from engine.core import EngineCore
from engine.grammar import GrammarSource
from engine.step_time import StepTimes
from engine.types import (
    AdapterRef,
    GenerateRequest,
    ModelDescription,
    RequestOutput,
    SamplingParams,
    SequenceStart,
    StepPlan,
)
from tests.fakes import VOCAB, FakeExecutor, FakeLoader, engine_config


class EngineUnderTest:
    """An EngineCore with its fakes, and what a test does with it."""

    def __init__(
        self,
        extents: int = 64,
        *,
        description: ModelDescription | None = None,
        step_ms: float | Callable[[StepPlan], float] = 10.0,
        step_times: StepTimes | None = None,
        script: Callable[[SequenceStart, int], int | None] | None = None,
        grammars: GrammarSource | None = None,
        **config: object,
    ) -> None:
        self.clock = SimulatedClock()
        self.executor = FakeExecutor(
            extents, description=description, clock=self.clock, step_ms=step_ms, script=script
        )
        self.loader = FakeLoader(self.clock)
        self.config = engine_config(**config)
        self.core = EngineCore(
            self.config, self.executor, self.loader, self.clock, step_times, grammars
        )
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.times_ms: dict[str, list[float]] = {}  # of every event
        self.tenants: dict[str, str] = {}
        self._count = 0

    def submit(
        self,
        prompt: list[int] | int = 20,
        *,
        request_id: str | None = None,
        tenant: str = "a",
        adapter: AdapterRef | None = None,
        cache_salt: str | None = None,
        max_tokens: int = 4,
        sampling: dict[str, object] | None = None,
        **values: object,
    ) -> str:
        """Submits a request (a number stands for a prompt of so many tokens of its own)."""
        self._count += 1
        request_id = request_id or f"r{self._count}"
        if isinstance(prompt, int):
            prompt = [2 + (self._count * 7 + i * 31) % (VOCAB - 2) for i in range(prompt)]
        self.core.submit(
            GenerateRequest(
                request_id=request_id,
                tenant=tenant,
                prompt=prompt,
                sampling=SamplingParams(max_tokens, **(sampling or {})),  # type: ignore[arg-type]
                cache_salt=tenant if cache_salt is None else cache_salt,
                adapter=adapter,
                **values,  # type: ignore[arg-type]
            )
        )
        self.tenants[request_id] = tenant
        return request_id

    def step(self, times: int = 1) -> list[RequestOutput]:
        """Steps, and files the events; time passes even when nothing ran."""
        events: list[RequestOutput] = []
        for _ in range(times):
            before = self.clock.now_ms()
            new = self.core.step()
            if self.clock.now_ms() == before:
                self.clock.advance(1.0)
            for event in new:
                self.outputs.setdefault(event.request_id, []).append(event)
                self.times_ms.setdefault(event.request_id, []).append(self.clock.now_ms())
            events += new
        return events

    def run(self, most_steps: int = 5000) -> None:
        """Until nothing is left to do."""
        for _ in range(most_steps):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError(f"work is left after {most_steps} steps")

    def run_until_resident(self, adapter: AdapterRef) -> None:
        """Brings an adapter onto the device with a request that is over afterwards."""
        self.submit(4, adapter=adapter, max_tokens=1)
        self.run()

    def tokens(self, request_id: str, choice: int = 0) -> list[int]:
        events = self.outputs.get(request_id, [])
        return [t for e in events if e.choice == choice for t in e.token_ids]

    def last(self, request_id: str) -> RequestOutput:
        return self.outputs[request_id][-1]

    def finished(self, request_id: str) -> bool:
        return bool(self.outputs.get(request_id)) and self.last(request_id).usage is not None

    def assert_stream_is_whole(self, request_id: str) -> None:
        """Numbered from 0 without a gap; usage on the last event and only there."""
        events = self.outputs[request_id]
        assert [event.sequence for event in events] == list(range(len(events)))
        assert [event.usage is not None for event in events] == [False] * (len(events) - 1) + [True]

    def assert_all_returned(self) -> None:
        """Nothing is referenced, pinned, loading or known to the executor any more."""
        status = self.core.status()
        assert (status.running, status.waiting, status.kv_blocks_used) == (0, 0, 0)
        assert all(item.pins == 0 for item in status.adapters)
        assert all(item.tier != "loading" for item in status.adapters)
        assert self.executor.live == {}
        assert self.loader.planned == set()
