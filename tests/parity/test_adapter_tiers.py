"""An adapter answers with the same bits from wherever it was brought to the device."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.adapters.folder_store import FolderStore
from engine.adapters.loader import StoreLoader
from engine.clock import SystemClock
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.model.linear import LinearPath
from engine.runner import CpuExecutor
from engine.sampler import Sampled
from engine.types import AdapterRef, GenerateRequest, SamplingParams
from tests.model_factories import ALL_TARGETS, make_adapter, make_llama, read_blob, write_gguf
from tests.parity.driver import RecordingSampler

SALT = "a" * 32
IN_TIME_S = 60.0


class EveryLogit(RecordingSampler):
    """Keeps those of all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def sample(self, logits: torch.Tensor, seqs: list[int]) -> list[Sampled]:
        self.seen += logits.clone()
        return super().sample(logits, seqs)


class CountingLoader(StoreLoader):
    """Knows which adapters it has read from the store, in order."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.read: list[AdapterRef] = []

    def build(self, ref: AdapterRef) -> None:
        self.read.append(ref)
        super().build(ref)


class Engine:
    """A tiny engine over a real store, with room for one adapter on the device."""

    def __init__(self, base: Path, folder: Path, *, path: LinearPath, like: Path, kept: int):
        """Host memory has room for `kept` adapters of the size of `like`."""
        config = EngineConfig(
            base_model=base, data_dir=folder / "data", arena_bytes=4 << 20, threads=1, max_slots=1,
            prefix_caching=False, batch_invariant=True, linear_path=path,
        )  # fmt: skip
        self.sampler = EveryLogit()
        self.store = FolderStore(folder / "store")
        executor = CpuExecutor(config, sampler=self.sampler)
        nbytes = read_blob(like, executor.description).layout.nbytes
        config = replace(config, host_cache_bytes=kept * nbytes + nbytes // 2)
        self.loader = CountingLoader(config, self.store, executor.description)
        self.core = EngineCore(config, executor, self.loader, SystemClock())
        self._asked = 0

    def put(self, adapter: Path) -> AdapterRef:
        with self.store.stage() as staging:
            staging.write_config((adapter / "adapter_config.json").read_bytes())
            staging.write_weights((adapter / "adapter_model.safetensors").read_bytes())
            return staging.commit(SALT).ref

    def answer(self, adapter: AdapterRef) -> torch.Tensor:
        """The logits [tokens, vocab] of one greedy answer."""
        self._asked += 1
        self.sampler.seen.clear()
        sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        self.core.submit(
            GenerateRequest(
                request_id=f"r{self._asked}", tenant="a", prompt=list(range(3, 40)),
                sampling=sampling, cache_salt="a", adapter=adapter,
            )
        )  # fmt: skip
        until = time.monotonic() + IN_TIME_S
        while self.core.has_work:
            assert time.monotonic() < until
            for output in self.core.step():
                assert output.error_code is None, output.error_message
        return torch.stack(self.sampler.seen)


@pytest.mark.parametrize("path", ["fp32", "native"])
@pytest.mark.parametrize(("tier", "kept"), [("host memory", 3), ("the store", 1)])
def test_an_adapter_that_comes_back_answers_as_before(
    tmp_path: Path, tier: str, kept: int, path: LinearPath
) -> None:
    model = make_llama(seed=8)
    write_gguf(model, tmp_path / "base.gguf", "Q4_1")
    folders = [
        make_adapter(model, tmp_path / f"a{seed}", seed=seed, r=8, target_modules=ALL_TARGETS)
        for seed in (1, 2)
    ]
    base = tmp_path / "base.gguf"
    engine = Engine(base, tmp_path, path=path, like=folders[0], kept=kept)
    try:
        ours, other = (engine.put(folder) for folder in folders)
        first = engine.answer(ours)
        beside = engine.answer(other)
        read = list(engine.loader.read)
        again = engine.answer(ours)
        assert engine.loader.read == read + [ours] * (tier == "the store")
    finally:
        engine.loader.close()
    assert len(first) == 6
    assert torch.equal(first, again)
    assert (first - beside).abs().max() > 0.5
