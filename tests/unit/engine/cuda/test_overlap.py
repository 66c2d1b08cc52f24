"""The engine over the two halves of a step: it answers as without them, ahead of the device."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.adapters.loading import Loaded, LoadEvent, Measured
from engine.clock import SystemClock
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.cuda.runner import CudaExecutor
from engine.runner import CpuExecutor
from engine.types import (
    AdapterBlob,
    AdapterRef,
    Executor,
    GenerateRequest,
    Grammar,
    RequestOutput,
    SamplingParams,
    StepPlan,
    StepResult,
)
from tests.fake_device import MIB, FakeDevice, plain_faces
from tests.model_factories import ALL_TARGETS, make_adapter, make_llama, read_blob, save_folder

REF = AdapterRef("salt", "a" * 64)
NO_EOS = {"temperature": 0.0, "ignore_eos": True}


class BlobLoader:
    """Has every adapter's blob at once."""

    def __init__(self, blobs: dict[AdapterRef, AdapterBlob]) -> None:
        self._blobs = blobs
        self._events: list[LoadEvent] = []

    def measure(self, ref: AdapterRef) -> None:
        layout = self._blobs[ref].layout
        self._events.append(Measured(ref, layout.nbytes, layout.max_rank))

    def build(self, ref: AdapterRef) -> None:
        self._events.append(Loaded(ref, self._blobs[ref]))

    def abandon(self, ref: AdapterRef) -> None: ...

    def poll(self) -> list[LoadEvent]:
        events, self._events = self._events, []
        return events

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("overlap")
    model = make_llama(seed=2, num_hidden_layers=1)
    adapter = make_adapter(model, folder / "a", seed=1, r=4, target_modules=ALL_TARGETS)
    return save_folder(model, folder / "base"), adapter


class Engine:
    def __init__(self, base: tuple[Path, Path], data_dir: Path, kind: str) -> None:
        config = EngineConfig(
            base_model=base[0], data_dir=data_dir, arena_bytes=MIB, max_running=4, max_rank=8,
            max_batch_tokens=32, prefill_chunk=16, max_slots=4, linear_path="fp32", threads=1,
            device_memory_share=1.0, prefix_caching=False,
        )  # fmt: skip
        self.device = FakeDevice(total_bytes=8 * MIB)
        if kind == "cpu":
            self.executor: Executor = CpuExecutor(config)
        else:
            self.executor = CudaExecutor(
                config, device=self.device, faces=plain_faces(self.device), captures=False
            )
        blobs = {REF: read_blob(base[1], self.executor.description)}
        self.core = EngineCore(config, self.executor, BlobLoader(blobs), SystemClock())
        self.outputs: list[RequestOutput] = []

    def submit(self, name: str, length: int, adapter: bool = False, **sampling: Any) -> None:
        prompt = [(len(name) * 13 + index * 7) % 90 + 3 for index in range(length)]
        params = SamplingParams(**{"max_tokens": 8, **NO_EOS, **sampling})
        ref = REF if adapter else None
        self.core.submit(GenerateRequest(name, "t", prompt, params, "salt", ref))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.outputs += self.core.step()
            self.device.finish_copies()

    def drain(self) -> None:
        for _ in range(200):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError("the engine does not come to an end")

    def tokens(self, name: str) -> list[int]:
        events = [event for event in self.outputs if event.request_id == name]
        assert [event.sequence for event in events] == list(range(len(events)))
        return [token for event in events for token in event.token_ids]

    def finish(self, name: str) -> str | None:
        return next(e.finish for e in reversed(self.outputs) if e.request_id == name)


def traffic(engine: Engine) -> None:
    """Arrivals while others decode, two lengths of answers, adapters, a penalty, a seed."""
    engine.submit("a", 20, max_tokens=21)
    engine.submit("bb", 5, adapter=True, max_tokens=9)
    engine.step(9)
    engine.submit("ccc", 30, max_tokens=4)
    engine.step(3)
    engine.submit("dddd", 7, adapter=True, temperature=0.8, seed=3, max_tokens=12)
    engine.submit("eeeee", 7, max_tokens=6, repetition_penalty=1.4)
    engine.drain()


def test_an_engine_that_works_ahead_answers_as_one_that_waits(base, tmp_path: Path) -> None:
    ahead, waiting = (Engine(base, tmp_path, kind) for kind in ("cuda", "cpu"))
    for engine in (ahead, waiting):
        traffic(engine)
    lengths = {"a": 21, "bb": 9, "ccc": 4, "dddd": 12, "eeeee": 6}
    for name, length in lengths.items():
        assert len(ahead.tokens(name)) == length
        assert ahead.tokens(name) == waiting.tokens(name)
        assert (ahead.finish(name), waiting.finish(name)) == ("length", "length")
    assert ahead.core.status().kv_blocks_used == 0


def test_a_decode_is_launched_before_the_one_before_it_is_waited_for(base, tmp_path: Path) -> None:
    engine = Engine(base, tmp_path, "cuda")
    order = watch(engine)
    engine.submit("a", 5, max_tokens=6)
    engine.drain()
    assert order == [
        "launch 0", "collect 0",  # the prompt: what follows a first token is decided anew
        "launch 1", "launch 2", "collect 1", "launch 3", "collect 2", "launch 4", "collect 3",
        "launch 5", "collect 4", "collect 5", "launch 6", "collect 6",  # the last one closes
    ]  # fmt: skip
    assert engine.tokens("a")


def watch(engine: Engine) -> list[str]:
    order: list[str] = []
    executor = engine.executor
    assert isinstance(executor, CudaExecutor)
    launch, collect = executor.launch, executor.collect

    def launching(plan: StepPlan) -> None:
        order.append(f"launch {plan.step}")
        launch(plan)

    def collecting() -> StepResult:
        result = collect()
        order.append(f"collect {result.step}")
        return result

    executor.launch, executor.collect = launching, collecting  # type: ignore[method-assign]
    return order


@pytest.mark.parametrize("sampling", [{"repetition_penalty": 1.2}, {"presence_penalty": 0.3}])
def test_a_row_that_looks_at_its_last_token_is_not_run_ahead(base, tmp_path, sampling) -> None:
    engine = Engine(base, tmp_path, "cuda")
    order = watch(engine)
    engine.submit("a", 5, max_tokens=4, **sampling)
    engine.drain()
    assert order == [f"{what} {step}" for step in range(5) for what in ("launch", "collect")]


def test_a_grammar_is_never_run_ahead(base, tmp_path) -> None:
    engine = Engine(base, tmp_path, "cuda")
    engine.submit("a", 5)
    engine.step(2)
    call = next(iter(engine.core._calls.values()))
    assert call.foreseeable
    call.request = GenerateRequest(
        "a", "t", [1], SamplingParams(max_tokens=1), "salt", grammar=Grammar("lark", "x")
    )
    assert not call.foreseeable


def test_what_follows_a_stop_token_is_computed_for_nothing(base, tmp_path: Path) -> None:
    waiting = Engine(base, tmp_path, "cpu")
    waiting.submit("a", 5)
    waiting.drain()
    stop = waiting.tokens("a")[4]
    first = waiting.tokens("a").index(stop)
    engine = Engine(base, tmp_path, "cuda")
    for name in ("a", "bb"):
        engine.submit(name, 5, stop_token_ids=(stop,) if name == "a" else ())
    engine.drain()
    assert engine.tokens("a") == waiting.tokens("a")[:first]
    assert engine.finish("a") == "stop"
    assert len(engine.tokens("bb")) == 8
    assert engine.core.status().completion_tokens_total == first + 1 + 8


def test_a_request_cancelled_while_its_step_runs_leaves_nothing_behind(base, tmp_path) -> None:
    engine = Engine(base, tmp_path, "cuda")
    engine.submit("a", 20, adapter=True, max_tokens=30)
    engine.submit("bb", 5, max_tokens=10)
    engine.step(8)
    engine.core.cancel("a")
    engine.core.forget(REF)
    engine.drain()
    assert engine.finish("a") == "cancelled"
    assert len(engine.tokens("bb")) == 10
    assert engine.core.status().kv_blocks_used == 0
    engine.submit("ccc", 20, max_tokens=8)
    engine.drain()
    assert len(engine.tokens("ccc")) == 8


def test_a_step_that_fails_ends_those_in_it_and_the_engine_goes_on(base, tmp_path) -> None:
    engine = Engine(base, tmp_path, "cuda")
    executor = engine.executor
    assert isinstance(executor, CudaExecutor)
    engine.submit("a", 5, max_tokens=30)
    engine.step(4)
    collect = executor.collect

    def failing() -> StepResult:
        raise torch.cuda.CudaError(700)

    executor.collect = failing  # type: ignore[method-assign]
    engine.step()
    executor.collect = collect  # type: ignore[method-assign]
    assert engine.finish("a") == "error"
    engine.submit("bb", 5)
    engine.drain()
    assert len(engine.tokens("bb")) == 8
    assert engine.core.status().kv_blocks_used == 0
