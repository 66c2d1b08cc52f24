"""The whole engine on a GPU against transformers and PEFT, and what its steps may not do.

Needs torch, triton, numpy, safetensors, transformers, peft and pytest:
python -m pytest -c /dev/null --noconftest tests/gpu
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cuda.runner import CudaExecutor
from engine.types import PENDING, PlanRow, SamplingParams, SequenceStart, StepPlan
from tests.cuda_driver import CudaDriver
from tests.model_factories import (
    ALL_TARGETS,
    make_adapter,
    make_llama,
    read_blob,
    save_folder,
    with_adapter,
    write_gguf,
)
from tests.parity.driver import Piece, reference_logits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOKENS = [(5 * index * index + index + 4) % 96 for index in range(400)]
SHAPE = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 1024,
}  # fmt: skip
OPTIONS: dict[str, Any] = {
    "device_memory_share": 0.2, "max_rank": 64, "max_running": 8, "max_batch_tokens": 256,
    "threads": 0,
}  # fmt: skip
BF16 = {"linear_path": "auto", "kv_dtype": "bf16", "adapter_dtype": "bf16"}
RANKS = {8: ALL_TARGETS, 33: ["embed_tokens", "lm_head", "q_proj", "down_proj"]}


def cuda_driver(base: Path, data_dir: Path, **options: Any) -> CudaDriver:
    from engine.cuda.torch_device import CudaDevice

    return CudaDriver(base, data_dir, device=CudaDevice(), **{**OPTIONS, **options})


def executor_of(driver: CudaDriver) -> CudaExecutor:
    assert isinstance(driver.executor, CudaExecutor)
    return driver.executor


def adapters(model: Any, folder: Path) -> list[Path]:
    return [
        make_adapter(model, folder / f"r{rank}", seed=rank, r=rank, target_modules=targets)
        for rank, targets in RANKS.items()
    ]


def run_mixed(driver: CudaDriver, model: Any, folders: list[Path], limit: float) -> None:
    """Prompts, then replayed decodes, of the base and every adapter in one batch."""
    for slot, folder in enumerate(folders):
        driver.add_adapter(slot, read_blob(folder, driver.executor.description))
    oracles = [*(with_adapter(model, folder) for folder in folders), model]
    wanted = {slot: reference_logits(oracles[slot], TOKENS) for slot in (*range(len(folders)), -1)}
    at = 0
    for size in (70, 70, 70, 70, 1, 1, 1):
        got = driver.feed(*(Piece(slot, TOKENS[at : at + size], slot) for slot in wanted))
        at += size
        for slot, logits in zip(wanted, got, strict=True):
            assert (logits - wanted[slot][at - 1]).abs().max() < limit


def test_the_exact_path_equals_peft(tmp_path: Path) -> None:
    model = make_llama(seed=11, tie_word_embeddings=False, **SHAPE)
    driver = cuda_driver(save_folder(model, tmp_path / "base"), tmp_path)
    run_mixed(driver, model, adapters(model, tmp_path), 1e-3)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "BF16"])
def test_every_stored_form_is_served_within_bf16(tmp_path: Path, kind: str) -> None:
    served = write_gguf(make_llama(seed=3, **SHAPE), tmp_path / "base.gguf", kind)
    driver = cuda_driver(tmp_path / "base.gguf", tmp_path, **BF16)
    run_mixed(driver, served, adapters(served, tmp_path), 0.3)


def test_after_warm_up_no_step_compiles_captures_or_reserves_memory(tmp_path: Path) -> None:
    model = write_gguf(make_llama(seed=3, **SHAPE), tmp_path / "base.gguf", "Q4_0")
    driver = cuda_driver(tmp_path / "base.gguf", tmp_path, **BF16)
    device = executor_of(driver).device
    for slot, folder in enumerate(adapters(model, tmp_path)):
        driver.add_adapter(slot, read_blob(folder, driver.executor.description))
    before = (device.compiles, device.captures, device.memory().reserved)
    assert device.compiles > 5
    assert device.captures > 5
    for mix in ([-1], [-1, 0], [0, 1, 0, -1], [1] * 7):
        for size in (31, 1, 2, 1):
            driver.feed(
                *(
                    Piece(seq, TOKENS[len(driver.fed(seq)) :][:size], slot)
                    for seq, slot in enumerate(mix)
                )
            )
        driver.close_all()
    assert (device.compiles, device.captures, device.memory().reserved) == before


def test_replayed_decodes_have_the_bits_of_eager_ones(tmp_path: Path) -> None:
    write_gguf(make_llama(seed=3, **SHAPE), tmp_path / "base.gguf", "Q4_0")
    results = []
    for captures in (True, False):
        driver = cuda_driver(tmp_path / "base.gguf", tmp_path, captures=captures, **BF16)
        driver.feed(Piece(0, TOKENS[:200]), Piece(1, TOKENS[:30]))
        results.append([driver.feed(Piece(0, [t]), Piece(1, [t])) for t in TOKENS[:5]])
        del driver  # gives its memory back before the next one divides it
    for replayed, eager in zip(*results, strict=True):
        for left, right in zip(replayed, eager, strict=True):
            assert torch.equal(left, right)


def test_steps_in_flight_take_their_tokens_on_the_device(tmp_path: Path) -> None:
    write_gguf(make_llama(seed=3, **SHAPE), tmp_path / "base.gguf", "Q4_0")
    answers = []
    for ahead in (False, True):
        executor = executor_of(cuda_driver(tmp_path / "base.gguf", tmp_path, **BF16))
        params = SamplingParams(max_tokens=99, temperature=0.8, top_p=0.9, seed=3)
        starts = [SequenceStart(seq, TOKENS[: 20 + seq], [], params, 0) for seq in range(4)]
        rows = [
            PlanRow(s.seq, 0, s.prompt, list(range(8 * s.seq, 8 * s.seq + 6)), -1, True)
            for s in starts
        ]
        results = [executor.execute(StepPlan(0, [], starts, [], rows))] if not ahead else []
        if ahead:
            executor.launch(StepPlan(0, [], starts, [], rows))
        for step in range(1, 40):
            rows = [
                PlanRow(
                    s.seq, len(s.prompt) + step - 1,
                    [PENDING if ahead else results[-1].rows[s.seq].token_ids[0]], [], -1, True,
                )
                for s in starts
            ]  # fmt: skip
            executor.launch(StepPlan(step, [], [], [], rows))
            results.append(executor.collect())
        if ahead:
            results.append(executor.collect())
        answers.append([[row.token_ids for row in result.rows] for result in results])
        del executor
    assert answers[0] == answers[1]


def test_adapters_arrive_moved_and_dropped_beside_running_steps(tmp_path: Path) -> None:
    model = make_llama(seed=11, **SHAPE)
    driver = cuda_driver(save_folder(model, tmp_path / "base"), tmp_path)
    executor = executor_of(driver)
    folders = adapters(model, tmp_path)
    blobs = [read_blob(folder, executor.description) for folder in folders]
    extents = -(-max(blob.layout.nbytes for blob in blobs) // driver.extent_bytes)
    top = executor.extent_count
    driver.feed(Piece(9, TOKENS[:20]))
    for round_number in range(10):
        for slot, blob in enumerate(blobs):
            executor.start_copy(slot, top - (slot + 1) * extents, blob)
        ready: list[int] = []
        at = 20 + round_number
        while len(ready) < 2:
            ready += executor.poll_copies(0)
        driver.feed(Piece(9, [TOKENS[at]]))
        executor.move_adapter(1, top - 2 * extents - 1)  # its ranges overlap
        for slot, folder in enumerate(folders):
            (got,) = driver.feed(Piece(slot, TOKENS[:30], slot))
            want = reference_logits(with_adapter(model, folder), TOKENS[:30])[-1]
            assert (got - want).abs().max() < 1e-3
            driver.close(slot)
            executor.drop_adapter(slot)
    want = reference_logits(model, TOKENS[:30])[-1]
    (got,) = driver.feed(Piece(5, TOKENS[:30]))
    assert (got - want).abs().max() < 1e-3


def test_the_budget_is_kept_and_the_arena_is_most_of_it(tmp_path: Path) -> None:
    model = make_llama(seed=11, **SHAPE)
    executor = executor_of(cuda_driver(save_folder(model, tmp_path / "base"), tmp_path))
    memory, budget = executor.device.memory(), executor.budget
    assert memory.total - memory.free <= budget.limit
    assert budget.arena > 0.5 * (budget.limit - budget.others)


def test_batch_invariant_rows_keep_their_bits_beside_others(tmp_path: Path) -> None:
    write_gguf(make_llama(seed=3, **SHAPE), tmp_path / "base.gguf", "Q4_0")
    driver = cuda_driver(tmp_path / "base.gguf", tmp_path, batch_invariant=True, **BF16)
    (alone,) = driver.feed(Piece(0, TOKENS[:50]))
    together = driver.feed(*(Piece(seq, TOKENS[seq : 50 + seq], -1) for seq in (3, 2, 1)),
                           Piece(4, TOKENS[:50]))  # fmt: skip
    assert torch.equal(alone, together[-1])
    (alone,) = driver.feed(Piece(0, [7]))
    together = driver.feed(*(Piece(seq, [seq]) for seq in (3, 2, 1)), Piece(4, [7]))
    assert torch.equal(alone, together[-1])
