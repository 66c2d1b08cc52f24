"""An engine over a real store while files in it are hostile, or gone: nobody else notices."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from engine.adapters.blob import build_blob
from engine.adapters.config import check_config
from engine.adapters.folder_store import FolderStore
from engine.adapters.loader import StoreLoader
from engine.adapters.plan import plan_adapter
from engine.adapters.safetensors_header import read_header
from engine.core import EngineCore
from engine.types import AdapterBlob, AdapterRef
from tests.adapter_files import HOSTILE, AdapterFiles, good_adapter, tiny_description
from tests.engine_under_test import EngineUnderTest
from tests.fakes import EXTENT_BYTES, expected_tokens

BASE = replace(tiny_description(), kv_block_bytes=EXTENT_BYTES)
OURS, THEIRS = "a" * 32, "b" * 32
PROMPT = [5, 6, 7, 8]
IN_TIME_S = 60.0
LOADS = {case.name for case in HOSTILE if case.group == "numbers"}
"""What only validation looks at: the engine may load it, and must answer others as ever."""


class EngineOverAStore(EngineUnderTest):
    """Loads from a folder in real threads; its tokens tell which adapter's bytes made them."""

    def __init__(self, folder: Path, **config: object) -> None:
        super().__init__(256, description=BASE, **config)
        self.store = FolderStore(folder)
        self.files = StoreLoader(self.config, self.store, BASE)
        self.core = EngineCore(self.config, self.executor, self.files, self.clock)

    def put(self, salt: str, files: AdapterFiles) -> AdapterRef:
        with self.store.stage() as staging:
            staging.write_config(files.config or b"")
            staging.write_weights(files.weights or b"")
            return staging.commit(salt).ref

    def blob(self, ref: AdapterRef) -> AdapterBlob:
        files = self.store.open(ref)
        config = check_config(files.config, 64).config
        assert config is not None
        plan = plan_adapter(config, read_header(files.weights_path), BASE)
        return build_blob(files.weights_path, plan, "bf16")

    def run_threads(self) -> None:
        """Until nothing is left to do; the loader's threads run in real time."""
        deadline = time.monotonic() + IN_TIME_S
        while self.core.has_work:
            assert time.monotonic() < deadline, "an engine that hangs"
            self.step()
            time.sleep(0.0005)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineOverAStore]:
    opened = EngineOverAStore(
        tmp_path / "store", max_waiting=2000, max_waiting_per_tenant=2000, max_slots=4
    )
    yield opened
    opened.files.close()


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.wide)])
def test_hostile_kinds_at_once_leave_another_tenants_answer_as_it_was(
    engine: EngineOverAStore, every: int
) -> None:
    """Each of them, or every ninth in the short run."""
    good = engine.put(OURS, good_adapter(BASE))
    expected = expected_tokens(PROMPT, 200, blob=engine.blob(good))
    built = {case.name: case.build(BASE) for case in HOSTILE[::every]}
    stored = {
        name: engine.put(THEIRS, files)
        for name, files in built.items()
        if files.config and files.weights
    }
    assert len(stored) >= 120 // every
    ours = engine.submit(PROMPT, tenant="ours", adapter=good, max_tokens=200)
    theirs = {
        name: engine.submit(PROMPT, tenant="theirs", adapter=ref, max_tokens=2)
        for name, ref in stored.items()
    }
    later = engine.submit(PROMPT, tenant="ours", adapter=good, max_tokens=20)
    engine.run_threads()
    assert engine.tokens(ours) == expected
    assert engine.tokens(later) == expected[:20]
    for name, request_id in theirs.items():
        last = engine.last(request_id)
        if name in LOADS:
            assert engine.finished(request_id), name
        else:
            assert last.error_code, name
            assert last.error_message, name
    status = engine.core.status()
    assert (status.running, status.waiting, status.kv_blocks_used) == (0, 0, 0)


class TestFilesThatAreGone:
    def test_a_resident_adapter_serves_on_and_a_cold_one_is_missing(
        self, engine: EngineOverAStore
    ) -> None:
        resident, cold = (engine.put(OURS, good_adapter(BASE, seed=seed)) for seed in (1, 2))
        expected = expected_tokens(PROMPT, 5, blob=engine.blob(resident))
        engine.submit(PROMPT, adapter=resident)
        engine.run_threads()
        for ref in (resident, cold):
            engine.store.delete(ref)
        again = engine.submit(PROMPT, adapter=resident, max_tokens=5)
        lost = engine.submit(PROMPT, adapter=cold)
        engine.run_threads()
        assert engine.tokens(again) == expected
        assert engine.last(lost).error_code == "adapter_missing"

    def test_it_is_served_again_once_the_file_is_back(self, engine: EngineOverAStore) -> None:
        files = good_adapter(BASE, seed=3)
        ref = engine.put(OURS, files)
        engine.store.delete(ref)
        engine.submit(PROMPT, adapter=ref)
        engine.run_threads()
        assert engine.put(OURS, files) == ref
        engine.clock.advance(engine.config.missing_retry_ms + 1)
        found = engine.submit(PROMPT, adapter=ref, max_tokens=5)
        engine.run_threads()
        assert engine.tokens(found) == expected_tokens(PROMPT, 5, blob=engine.blob(ref))


@pytest.mark.parametrize("flips", [80, pytest.param(1000, marks=pytest.mark.wide)])
def test_adapters_that_flip_at_random_under_load_never_mix(
    engine: EngineOverAStore, flips: int
) -> None:
    """More adapters than slots, of several ranks and scales, and rows of none between them."""
    random = Random(7)
    refs = [
        engine.put(OURS, good_adapter(BASE, seed=n, rank=1 + n % 8, config={"lora_alpha": 4 + n}))
        for n in range(12)
    ]
    expected = {ref: expected_tokens(PROMPT, 6, blob=engine.blob(ref)) for ref in refs}
    expected_of_none = expected_tokens(PROMPT, 6)
    asked: dict[str, list[int]] = {}
    for _ in range(flips):
        ref = random.choice([None, *refs])
        count = random.randint(1, 6)
        request_id = engine.submit(PROMPT, tenant="ours", adapter=ref, max_tokens=count)
        asked[request_id] = (expected_of_none if ref is None else expected[ref])[:count]
        engine.step(random.randint(0, 3))
    engine.run_threads()
    for request_id, tokens in asked.items():
        assert engine.tokens(request_id) == tokens
