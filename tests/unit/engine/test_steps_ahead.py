"""Steps begun before the last one's tokens are known: whatever happens, answers stay the same."""

import random
from collections import deque
from dataclasses import replace

import pytest

from engine.types import PENDING, StepPlan, StepResult
from tests import engine_under_test
from tests.engine_under_test import EngineUnderTest
from tests.fakes import FakeExecutor


class OverlappingExecutor(FakeExecutor):
    """Runs what is launched in its order, as a stream does; `order` tells launches from results."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.results: deque[StepResult] = deque()
        self.order: list[str] = []
        self.fail_in_collect = False

    def launch(self, plan: StepPlan) -> None:
        assert len(self.results) < 2, "at most two steps are in flight"
        rows = []
        for row in plan.rows:
            if row.tokens == [PENDING]:
                assert self.results, "the token is drawn by a step in flight"
                assert row.seq in {each.seq for each in self.results[-1].rows}
                row = replace(row, tokens=self.live[row.seq].tokens[row.start : row.start + 1])
            rows.append(row)
        self.order.append("ahead" if self.results else "launch")
        self.results.append(super().execute(replace(plan, rows=rows)))

    def collect(self) -> StepResult:
        if self.fail_in_collect:
            raise RuntimeError("the device failed")
        self.order.append("collect")
        return self.results.popleft()

    def abandon(self) -> None:
        self.results.clear()

    def execute(self, plan: StepPlan) -> StepResult:
        raise AssertionError("an executor with two halves is driven by them")


@pytest.fixture
def overlapping(monkeypatch: pytest.MonkeyPatch):
    def make(**options) -> EngineUnderTest:
        with monkeypatch.context() as patched:
            patched.setattr(engine_under_test, "FakeExecutor", OverlappingExecutor)
            return EngineUnderTest(**options)

    return make


def random_traffic(engine: EngineUnderTest, seed: int) -> list[str]:
    """The requests that were not cancelled. What is submitted does not depend on the engine."""
    rng = random.Random(seed)
    adapters = [engine.loader.add(f"a{index}", extents=rng.choice((1, 2, 3))) for index in range(4)]
    kept = []
    for _ in range(rng.randint(4, 14)):
        sampling = rng.choice(({}, {}, {}, {"presence_penalty": 0.5}, {"ignore_eos": True}))
        request = engine.submit(
            rng.randint(1, 60), adapter=rng.choice((None, None, *adapters)),
            max_tokens=rng.randint(1, 40), choices=rng.choice((1, 1, 1, 2)), sampling=sampling,
            tenant=rng.choice("ab"),
        )  # fmt: skip
        kept.append(request)
        engine.step(rng.choice((0, 1, 3, 12)))
        if rng.random() < 0.15:
            engine.core.cancel(kept.pop(rng.randrange(len(kept))))
        if adapters and rng.random() < 0.1:
            engine.core.forget(adapters.pop())
    engine.run()
    return kept


@pytest.mark.parametrize("seed", range(25))
def test_any_traffic_is_answered_as_by_an_engine_that_waits(overlapping, seed: int) -> None:
    rng = random.Random(seed)
    options = {
        "extents": rng.choice((24, 40, 80)), "max_running": rng.choice((3, 8)),
        "max_batch_tokens": 32, "prefill_chunk": 16, "max_slots": 3,
        "prefix_caching": rng.random() < 0.5,
    }  # fmt: skip
    waiting, ahead = EngineUnderTest(**options), overlapping(**options)
    kept = random_traffic(waiting, seed)
    assert random_traffic(ahead, seed) == kept
    for request in kept:
        for engine in (waiting, ahead):
            engine.assert_stream_is_whole(request)
        if "error" in (waiting.last(request).finish, ahead.last(request).finish):
            continue  # its adapter was erased at a moment of each engine's own
        for choice in (0, 1):
            assert ahead.tokens(request, choice) == waiting.tokens(request, choice)
        assert ahead.last(request).finish == waiting.last(request).finish
    ahead.assert_all_returned()


def test_a_lone_decode_is_always_a_step_ahead(overlapping) -> None:
    engine = overlapping()
    engine.submit(4, max_tokens=8, sampling={"ignore_eos": True})
    engine.run()
    order = engine.executor.order
    assert order[:6] == ["launch", "collect", "launch", "ahead", "collect", "ahead"]
    assert order.count("ahead") == 6  # of seven decodes all but the first
    engine.assert_all_returned()


def test_whoever_waits_is_admitted_by_the_next_step_but_one(overlapping) -> None:
    engine = overlapping()
    engine.submit(4, max_tokens=60, sampling={"ignore_eos": True})
    engine.step(5)
    late = engine.submit(4, max_tokens=2, sampling={"ignore_eos": True})
    engine.step(2)
    assert engine.tokens(late)


def test_a_full_batch_runs_ahead_though_others_wait(overlapping) -> None:
    engine = overlapping(max_running=2)
    requests = [
        engine.submit(4, max_tokens=length, sampling={"ignore_eos": True}) for length in (9, 30, 2)
    ]
    engine.run()
    assert engine.executor.order.count("ahead") > 20
    # the third gets the place of the first in the step after its last token
    first, second, third = (engine.times_ms[request] for request in requests)
    assert third[0] <= first[-1] + 10.0
    assert third[-1] < second[-1]
    engine.assert_all_returned()


def test_penalties_and_prompts_are_never_run_ahead(overlapping) -> None:
    engine = overlapping()
    engine.submit(40, max_tokens=6, sampling={"frequency_penalty": 0.1, "ignore_eos": True})
    engine.submit(40, max_tokens=6, sampling={"ignore_eos": True})
    engine.run()
    assert "ahead" not in engine.executor.order


def test_a_step_ahead_is_not_begun_when_its_blocks_would_have_to_be_won(overlapping) -> None:
    engine = overlapping(extents=6, adapter_share=0.1, prefix_caching=False, max_running=4)
    requests = [engine.submit(30, max_tokens=34, sampling={"ignore_eos": True}) for _ in range(2)]
    engine.run()
    assert [len(engine.tokens(request)) for request in requests] == [34, 34]
    assert engine.core.status().preemptions_total > 0
    engine.assert_all_returned()


def test_a_failure_ends_what_was_in_flight_and_nothing_else(overlapping) -> None:
    engine = overlapping()
    first = engine.submit(4, max_tokens=60, sampling={"ignore_eos": True})
    engine.step(5)
    assert engine.executor.results
    engine.executor.fail_in_collect = True
    engine.step()
    engine.executor.fail_in_collect = False
    assert engine.last(first).error_code == "engine_step_failed"
    second = engine.submit(4, max_tokens=3, sampling={"ignore_eos": True})
    engine.run()
    assert len(engine.tokens(second)) == 3
    engine.assert_all_returned()
