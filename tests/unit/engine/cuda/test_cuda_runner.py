"""What a step of the CUDA runner does to the device: nothing new, in order, ahead of the host."""

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.cuda.runner import CudaExecutor
from engine.grammar import MatcherSource
from engine.types import (
    PENDING,
    PlanRow,
    RowResult,
    SamplingParams,
    SequenceStart,
    StepPlan,
)
from tests.fake_device import MIB, FakeDevice, plain_faces
from tests.model_factories import ALL_TARGETS, make_adapter, make_llama, read_blob, save_folder

PROMPTS = {seq: [(seq * 17 + index * 5) % 96 for index in range(6 + 9 * seq)] for seq in range(3)}
PARAMS = {
    0: SamplingParams(max_tokens=9, temperature=0.0),
    1: SamplingParams(max_tokens=9, temperature=0.9, top_p=0.9, seed=5),
    2: SamplingParams(max_tokens=9, temperature=1.3, top_k=20, seed=6, min_tokens=9),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = make_llama(seed=2, num_hidden_layers=2)
    folder = tmp_path_factory.mktemp("cuda")
    adapters = {
        rank: make_adapter(model, folder / f"r{rank}", seed=rank, r=rank, target_modules=targets)
        for rank, targets in ((8, ALL_TARGETS), (20, ["q_proj", "lm_head"]))
    }
    return save_folder(model, folder / "base"), adapters


@pytest.fixture
def make(base: Any, tmp_path: Path) -> Callable[..., CudaExecutor]:
    def make(device: FakeDevice, **changes: Any) -> CudaExecutor:
        options = {
            "max_slots": 4, "max_rank": 32, "max_running": 4, "max_batch_tokens": 64,
            "linear_path": "fp32", "device_memory_share": 1.0,
        }  # fmt: skip
        grammars: MatcherSource | None = changes.pop("grammars", None)
        captures = changes.pop("captures", True)
        config = EngineConfig(base_model=base[0], data_dir=tmp_path, **{**options, **changes})
        faces = plain_faces(device)
        return CudaExecutor(
            config, grammars=grammars, device=device, faces=faces, captures=captures
        )

    return make


def load(executor: CudaExecutor, folder: Path, slot: int) -> None:
    blob = read_blob(folder, executor.description)
    first = executor.extent_count - 40 * (slot + 1)
    executor.start_copy(slot, first, blob)
    executor.device.synchronize()
    assert executor.poll_copies(0) == [slot]


def first_step(slots: dict[int, int], **asked: Any) -> StepPlan:
    """All prompts at once, each in blocks of its own. `asked`: of each one's sampling."""
    started = [
        SequenceStart(seq, PROMPTS[seq], [], replace(PARAMS[seq], **asked), 0) for seq in PROMPTS
    ]
    rows = [
        PlanRow(seq, 0, prompt, [4 * seq, 4 * seq + 1, 4 * seq + 2], slots.get(seq, -1), True)
        for seq, prompt in PROMPTS.items()
    ]
    return StepPlan(0, [], started, [], rows)


def decode_step(step: int, tokens: dict[int, int], slots: dict[int, int]) -> StepPlan:
    """The decode that follows `step` - 1 others."""
    rows = [
        PlanRow(seq, len(PROMPTS[seq]) + step - 1, [token], [], slots.get(seq, -1), True)
        for seq, token in tokens.items()
    ]
    return StepPlan(step, [], [], [], rows)


def tokens_of(rows: list[RowResult]) -> dict[int, int]:
    return {row.seq: row.token_ids[0] for row in rows}


def run_in_turn(
    executor: CudaExecutor, steps: int, slots: dict[int, int], **asked: Any
) -> list[dict[int, int]]:
    """The tokens of every step, each collected before the next is launched."""
    results = [tokens_of(executor.execute(first_step(slots, **asked)).rows)]
    for step in range(1, steps):
        plan = decode_step(step, results[-1], slots)
        results.append(tokens_of(executor.execute(plan).rows))
    return results


def held_bytes() -> int:
    """Of all tensors of this process, each piece of memory once."""
    storages = (found.untyped_storage() for found in gc.get_objects() if type(found) is Tensor)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_what_a_tensor_holds_is_counted_once() -> None:
    before = held_bytes()
    held = torch.zeros(1000)
    views = [held[:500], held.view(10, 100)]
    assert held_bytes() - before == 4000
    del held, views
    assert held_bytes() == before


@pytest.mark.parametrize("path", ["fp32", "auto"])
def test_after_warm_up_no_step_compiles_captures_or_asks_for_memory(
    base: Any, make: Callable[..., CudaExecutor], path: str
) -> None:
    device = FakeDevice()
    executor = make(device, linear_path=path)
    load(executor, base[1][8], 0)
    assert device.compiles > 10

    def run(slots: dict[int, int]) -> None:
        run_in_turn(executor, 4, slots, logprobs=5)
        executor.execute(StepPlan(9, list(PROMPTS), [], [], []))

    before = (device.compiles, device.captures, device.memory())
    run({0: 0})
    load(executor, base[1][20], 1)  # a rank and a target that no step has met
    held = held_bytes()
    for slots in ({}, {0: 0, 1: 1, 2: 0}, {1: 1}):
        run(slots)
    assert (device.compiles, device.captures, device.memory()) == before
    assert held_bytes() <= held


def test_replayed_steps_answer_as_eager_ones(base: Any, make: Callable[..., CudaExecutor]) -> None:
    results = []
    for captures in (True, False):
        device = FakeDevice()
        executor = make(device, captures=captures)
        load(executor, base[1][8], 0)
        results.append(run_in_turn(executor, 5, {0: 0, 2: 0}))
        assert (("replay",) in device.log) == captures
    assert results[0] == results[1]


def test_a_step_launched_before_the_last_was_collected_takes_its_tokens_on_the_device(
    base: Any, make: Callable[..., CudaExecutor]
) -> None:
    slots = {1: 0}
    executor = make(FakeDevice())
    load(executor, base[1][8], 0)
    wanted = run_in_turn(executor, 5, slots)

    device = FakeDevice()
    executor = make(device)
    load(executor, base[1][8], 0)
    executor.launch(first_step(slots))
    got = []
    for step in range(1, 5):
        device.log.clear()
        executor.launch(decode_step(step, dict.fromkeys(PROMPTS, PENDING), slots))
        assert ("host waits", "steps") not in [entry[:2] for entry in device.log[1:]]
        got.append(tokens_of(executor.collect().rows))
    got.append(tokens_of(executor.collect().rows))
    assert got == wanted


def test_rows_may_change_their_places_between_overlapping_steps(
    make: Callable[..., CudaExecutor],
) -> None:
    wanted = run_in_turn(make(FakeDevice()), 3, {})
    executor = make(FakeDevice())
    executor.launch(first_step({}))
    executor.launch(decode_step(1, {2: PENDING, 0: PENDING}, {}))  # 1 rests
    assert tokens_of(executor.collect().rows) == wanted[0]
    executor.launch(decode_step(2, {0: PENDING, 2: PENDING}, {}))
    assert tokens_of(executor.collect().rows) == {seq: wanted[1][seq] for seq in (2, 0)}
    assert tokens_of(executor.collect().rows) == {seq: wanted[2][seq] for seq in (0, 2)}


def test_a_sequence_closed_while_it_runs_ends_quietly(make: Callable[..., CudaExecutor]) -> None:
    executor = make(FakeDevice())
    executor.launch(first_step({}))
    executor.launch(decode_step(1, dict.fromkeys(PROMPTS, PENDING), {}))
    executor.collect()
    rest = decode_step(2, {0: PENDING, 1: PENDING}, {})
    executor.launch(StepPlan(2, [2], [], [], rest.rows))
    assert [len(row.token_ids) for row in executor.collect().rows] == [1, 1, 1]
    assert [row.seq for row in executor.collect().rows] == [0, 1]


def test_a_token_that_no_step_draws_is_refused(make: Callable[..., CudaExecutor]) -> None:
    executor = make(FakeDevice())
    executor.execute(first_step({}))
    executor.execute(decode_step(1, {0: 7}, {}))
    with pytest.raises(ValueError, match="no step in flight draws"):
        executor.launch(decode_step(2, {1: PENDING}, {}))


def test_no_more_than_two_steps_are_in_flight(make: Callable[..., CudaExecutor]) -> None:
    executor = make(FakeDevice())
    executor.launch(first_step({}))
    executor.launch(decode_step(1, dict.fromkeys(PROMPTS, PENDING), {}))
    with pytest.raises(ValueError, match="in flight already"):
        executor.launch(decode_step(2, dict.fromkeys(PROMPTS, PENDING), {}))


def test_an_adapter_dropped_while_a_step_runs_changes_nothing_of_it(
    base: Any, make: Callable[..., CudaExecutor]
) -> None:
    slots = {0: 0}
    executor = make(FakeDevice())
    load(executor, base[1][8], 0)
    wanted = run_in_turn(executor, 2, slots)
    executor = make(FakeDevice())
    load(executor, base[1][8], 0)
    executor.execute(first_step(slots))
    executor.launch(decode_step(1, wanted[0], slots))
    executor.drop_adapter(0)
    executor.start_copy(0, executor.extent_count - 40, read_blob(base[1][20], executor.description))
    executor.device.synchronize()
    assert tokens_of(executor.collect().rows) == wanted[1]


def test_log_probabilities_and_penalties_are_those_of_the_cpu(
    base: Any, make: Callable[..., CudaExecutor], tmp_path: Path
) -> None:
    from engine.runner import CpuExecutor

    params = SamplingParams(
        max_tokens=9, temperature=0.0, logprobs=3, repetition_penalty=1.3, presence_penalty=0.5,
        frequency_penalty=0.2, logit_bias={5: 4.0},
    )  # fmt: skip
    config = EngineConfig(
        base_model=base[0], data_dir=tmp_path, arena_bytes=4 * MIB, linear_path="fp32", threads=1
    )
    results = []
    for executor in (make(FakeDevice()), CpuExecutor(config)):
        start = SequenceStart(0, PROMPTS[2], [], params, 0)
        row = PlanRow(0, 0, PROMPTS[2], [0, 1, 2], -1, True)
        rows = executor.execute(StepPlan(0, [], [start], [], [row])).rows
        for step in range(1, 6):
            at = len(PROMPTS[2]) + step - 1
            following = PlanRow(0, at, [rows[-1].token_ids[0]], [], -1, True)
            rows += executor.execute(StepPlan(step, [], [], [], [following])).rows
        results.append(rows)
    for ours, theirs in zip(*results, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs
        assert theirs.logprobs
        assert ours.logprobs[0].logprob == pytest.approx(theirs.logprobs[0].logprob, abs=1e-4)
        assert [t for t, _ in ours.logprobs[0].top] == [t for t, _ in theirs.logprobs[0].top]


def test_the_arena_is_what_model_buffers_and_graphs_leave(
    make: Callable[..., CudaExecutor], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "engine.cuda.runner")
    device = FakeDevice(total_bytes=32 * MIB, graph_bytes=100_000)
    executor = make(device)
    assert executor.budget.graphs == 100_000 * device.captures // 1 - 200_000  # two were for trial
    assert executor.budget.extents == executor.extent_count
    assert executor.budget.arena < 32 * MIB - executor.budget.graphs
    assert any("arena" in record.getMessage() for record in caplog.records)
