"""The GPU benchmark of the whole engine runs: on a fake device, at sizes that tell nothing."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks import gpu_check, gpu_engine, roofline
from engine.types import PlanRow, SamplingParams, SequenceStart, StepPlan
from tests.fake_device import FakeDevice, plain_faces

TINY = replace(
    gpu_engine.LLAMA_8B, vocab_size=96, hidden_size=128, intermediate_size=256, layers=1, heads=2,
    kv_heads=1, head_dim=64, context_length=256,
)  # fmt: skip


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_engine, "REPEATS", 3)
    monkeypatch.setattr(gpu_engine, "CONTEXT", 20)
    monkeypatch.setattr(gpu_engine, "RANKS", (2, 4))
    monkeypatch.setattr(gpu_engine.linear, "kept_int4", gpu_engine.packed_once())

    def make(path: str = "auto", **options: Any):
        device = FakeDevice(total_bytes=32 << 20, copies_at_once=True)
        return gpu_engine.open_engine(
            TINY, device=device, faces=plain_faces(device), linear_path=path, max_rank=4,
            max_running=4, max_batch_tokens=32, max_slots=4, **options,
        )  # fmt: skip

    return make


def test_the_served_path_answers_as_the_exact_one_over_the_same_random_codes(make) -> None:
    logits = []
    for path in ("auto", "fp32"):
        executor = make(path)
        start = SequenceStart(0, [1, 2, 3], [], SamplingParams(4, 0.0), 0)
        row = PlanRow(0, 0, [1, 2, 3], [0], -1, True)
        executor.execute(StepPlan(0, [], [start], [], [row]))
        logits.append(executor.logits[0].clone())
    assert (logits[0] - logits[1]).abs().max() < 0.05 * logits[1].abs().max()
    assert logits[1].abs().max() > 0.01


@pytest.mark.parametrize("merged", [True, False])
def test_an_adapter_answers_as_weights_that_have_it_merged_and_as_no_others(
    make, monkeypatch, capsys, merged: bool
) -> None:
    def opened(config: Any, *, linear_path: str, checkpoint: Any = None, **options: Any):
        return make(linear_path, checkpoint=checkpoint if merged else None, **options)

    monkeypatch.setattr(gpu_check, "BLOCKS", 2)
    assert gpu_check.check(TINY, rank=4, prompt=[1, 5, 2, 9], opened=opened) is merged
    assert ("WRONG" in capsys.readouterr().out) is not merged


def test_steps_are_timed_with_adapters_and_beside_loads(make, capsys) -> None:
    executor = make()
    blobs = {rank: gpu_engine.blob_of(executor, rank) for rank in gpu_engine.RANKS}
    assert gpu_engine.load_adapters(executor, blobs, 3) > 0
    assert gpu_engine.decode_ms(executor, [-1, 0, 1, 2], context=20) > 0
    executor.replay(graphs=False)
    assert gpu_engine.decode_ms(executor, [0], context=20) > 0
    gpu_engine.beside_loads(executor, blobs[4], slot=3, rows=2)
    assert "arrived" in capsys.readouterr().out


def test_the_floor_of_a_step_grows_with_what_it_reads() -> None:
    base = gpu_engine.step_work([(1023, 1)] * 32, [], 32)
    mixed = gpu_engine.step_work([(1023, 1)] * 32, [16] * 32, 32)
    assert base.bytes > 32 * 1024 * 128 * 1024 + 6.9e9 * 0.5  # the cache and the weights
    assert base.bytes < 12e9
    assert mixed.operations > base.operations
    adapters = gpu_engine.adapter_work([16, 64])
    assert adapters.bytes == 2 * 32 * 81920 * (16 + 64)
    assert (base + adapters).bytes == base.bytes + adapters.bytes
    assert isinstance(base, roofline.Work)
