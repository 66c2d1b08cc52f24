"""After its first steps the engine compiles nothing and its memory stays, whatever comes."""

import gc
import random
import re
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numba
import pytest
from numba.core import event

from engine.kernels.lora_torch import TorchLora
from engine.types import AdapterBlob
from tests.adapter_files import good_adapter
from tests.model_factories import make_llama, read_blob, save_folder
from tests.parity.driver import Driver, Piece

MIB = 1 << 20
RANKS = [1, 2, 3, 5, 8, 12, 16, 17, 31, 32, 48, 64, 100, 128]
SLOTS = 6
MOST_ROWS = 40
PATHS = ["fp32", "native"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_llama(seed=1, max_position_embeddings=512)
    return save_folder(model, tmp_path_factory.mktemp("base"))


class Traffic:
    """Random steps: prefills of any length, decodes, adapters of new ranks that come and go."""

    def __init__(self, base: Path, folder: Path, seed: int, path: str) -> None:
        self.driver = Driver(
            base, folder / "data", adapter_dtype="bf16", arena_bytes=8 * MIB, linear_path=path
        )
        self.random = random.Random(seed)
        self.folder = folder
        self.live: dict[int, int] = {}  # sequence -> slot
        self.slots: dict[int, tuple[int, int]] = {}  # slot -> extents
        self.next_seq = self.made = 0

    def blob(self, rank: int) -> AdapterBlob:
        self.made += 1
        description = self.driver.executor.description
        targets = self.random.sample(["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"], 3)
        files = good_adapter(description, rank=rank, seed=self.made, targets=targets)
        return read_blob(files.write(self.folder / "adapter"), description)

    def change_adapter(self, rank: int) -> None:
        """Another adapter in a slot that no sequence uses."""
        idle = [slot for slot in range(SLOTS) if slot not in self.live.values()]
        if not idle:
            return
        slot, executor = self.random.choice(idle), self.driver.executor
        if slot in self.slots:
            executor.drop_adapter(slot)
        blob, room = self.blob(rank), executor.extent_count // 2 // SLOTS
        assert blob.layout.nbytes <= room * self.driver.extent_bytes
        executor.start_copy(slot, executor.extent_count // 2 + slot * room, blob)
        assert executor.poll_copies(blob.layout.nbytes) == [slot]
        self.slots[slot] = (slot, room)

    def step(self) -> None:
        pieces = [
            Piece(seq, [self.random.randrange(96)], slot)
            for seq, slot in self.live.items()
            if self.random.random() < 0.8
        ]
        while len(self.live) < 12 and self.random.random() < 0.5:
            slot = self.random.choice([-1, *self.slots])
            length = self.random.choice([1, 3, 7, 20])
            if length + sum(len(piece.tokens) for piece in pieces) > MOST_ROWS:
                break
            pieces.append(
                Piece(self.next_seq, [self.random.randrange(96) for _ in range(length)], slot)
            )
            self.live[self.next_seq] = slot
            self.next_seq += 1
        if pieces:
            self.driver.feed(*pieces)
        for seq in list(self.live):
            if len(self.driver.fed(seq)) > 80 or self.random.random() < 0.1:
                self.driver.close(seq)
                del self.live[seq]


@contextmanager
def compiled() -> Iterator[list[str]]:
    """What numba compiles, or reads from its cache, meanwhile."""
    names: list[str] = []
    with event.install_recorder("numba:compiler_lock") as recorder:
        yield names
    names += [str(what) for _, what in recorder.buffer]


def test_a_compilation_would_be_seen() -> None:
    with compiled() as names:
        numba.njit(lambda x: x + 1)(2)
    assert names


@pytest.mark.parametrize("path", PATHS)
def test_new_ranks_adapters_and_mixes_compile_nothing(
    base: Path, tmp_path: Path, path: str
) -> None:
    traffic = Traffic(base, tmp_path, seed=1, path=path)
    assert not isinstance(traffic.driver.executor._lora, TorchLora), "numba is installed"
    with compiled() as names:
        for rank in RANKS:
            traffic.change_adapter(rank)
            for _ in range(3):
                traffic.step()
    assert traffic.made > len(RANKS) // 2
    assert not names


def resident_bytes() -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.timeout(300)  # some seconds; far more where other work holds the cores
@pytest.mark.parametrize("path", PATHS)
def test_memory_stays_as_it_is_over_many_steps(base: Path, tmp_path: Path, path: str) -> None:
    traffic = Traffic(base, tmp_path, seed=2, path=path)
    driver = traffic.driver
    for rows in range(1, MOST_ROWS + 1):  # oneDNN keeps code for every number of rows
        driver.feed(Piece(-1, [5] * rows))
        driver.close(-1)
    for rows in range(1, 13):
        driver.feed(*(Piece(-1 - row, [5]) for row in range(rows)))
        driver.close_all()

    def run(steps: int) -> None:
        for index in range(steps):
            if index % 3 == 0:
                traffic.change_adapter(RANKS[index // 3 % len(RANKS)])
            traffic.step()
        gc.collect()

    def end_all() -> None:
        driver.close_all()
        traffic.live.clear()
        driver.feed(Piece(-1, [5]))
        driver.close(-1)
        driver.feed(Piece(-2, [5]))
        driver.close(-2)
        gc.collect()

    run(30)
    resident = resident_bytes()
    run(40)
    assert resident_bytes() - resident < 8 * MIB
    end_all()
    objects, begun = len(gc.get_objects()), traffic.next_seq
    tracemalloc.start()
    try:
        traced, _ = tracemalloc.get_traced_memory()
        run(30)
        end_all()
        assert tracemalloc.get_traced_memory()[0] - traced < MIB // 8
    finally:
        tracemalloc.stop()
    sequences = traffic.next_seq - begun
    assert sequences > 10
    assert len(gc.get_objects()) - objects < sequences / 2, "something is kept of each sequence"
    assert traffic.made > 15
