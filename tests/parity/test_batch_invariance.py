"""In batch-invariant mode no bit of a sequence's logits depends on how its steps were made up."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.linear import Linear, choose_path, make_rows_stable, rows_are_stable
from engine.model.loader import open_checkpoint
from tests.cuda_driver import CudaDriver
from tests.model_factories import (
    ALL_TARGETS,
    make_adapter,
    make_llama,
    read_blob,
    save_folder,
    write_gguf,
)
from tests.parity.driver import Driver, Piece

PROMPT = [(5 * index * index + 11 * index + 3) % 96 for index in range(93)]
OTHER = [(9 * index * index + 2 * index + 1) % 96 for index in range(80)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Path], list[Path]]:
    """A checkpoint by its format, and two adapters for all of them."""
    model = make_llama(seed=21, intermediate_size=160)
    folder = tmp_path_factory.mktemp("invariance")
    adapters = [
        make_adapter(model, folder / f"a{rank}", seed=rank, r=rank, target_modules=ALL_TARGETS)
        for rank in (4, 16)
    ]
    checkpoints = {"F32": save_folder(model, folder / "base")}
    for kind in ("Q4_1", "Q8_0"):
        checkpoints[kind] = folder / f"{kind}.gguf"
        write_gguf(model, checkpoints[kind], kind)
    return checkpoints, adapters


OPTIONS: dict[str, dict[str, Any]] = {
    "torch": {"linear_path": "fp32"},
    "native": {"linear_path": "native"},
    "cuda": {
        "linear_path": "auto", "kv_dtype": "auto", "adapter_dtype": "auto", "max_batch_tokens": 256,
    },
}  # fmt: skip
DEAR = {("torch", "Q8_0", 3), ("torch", "Q4_1", 3), ("native", "Q8_0", 3), ("native", "Q4_1", 3),
        ("torch", "Q8_0", 1), ("cuda", "Q8_0", 1)}  # fmt: skip
"""What the wide run alone has: torch decodes both formats alike, and CUDA Q8_0 as plain numbers."""
CASES = [
    pytest.param(
        (backend, kind, threads),
        id=f"{backend}, {kind}, {threads} threads",
        marks=[pytest.mark.wide] if (backend, kind, threads) in DEAR else [],
    )
    for backend in OPTIONS
    for kind in ("F32", "Q4_1", "Q8_0")
    for threads in (1, 3)
    if backend != "cuda" or threads == 1
]


@pytest.fixture(scope="module", params=CASES)
def opened(
    base: tuple[dict[str, Path], list[Path]],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Driver:
    backend, kind, threads = request.param
    kind_of_driver = CudaDriver if backend == "cuda" else Driver
    driver = kind_of_driver(
        base[0][kind], tmp_path_factory.mktemp("data"), batch_invariant=True, threads=threads,
        **OPTIONS[backend],
    )  # fmt: skip
    for slot, folder in enumerate(base[1]):
        driver.add_adapter(slot, read_blob(folder, driver.executor.description))
    return driver


@pytest.fixture
def driver(opened: Driver) -> Iterator[Driver]:
    before = torch.get_num_threads()
    torch.set_num_threads(opened.config.threads)
    opened.close_all()
    yield opened
    torch.set_num_threads(before)


@pytest.mark.parametrize("slot", [-1, 0, 1])
class TestBitwiseEqual:
    def alone(self, driver: Driver, slot: int) -> dict[int, torch.Tensor]:
        """Logits after the first n tokens: one prefill, then decodes."""
        logits = {80: driver.feed(Piece(0, PROMPT[:80], slot))[0]}
        for at in range(80, 93):
            logits[at + 1] = driver.feed(Piece(0, PROMPT[at : at + 1], slot))[0]
        return logits

    def test_in_one_mixed_batch(self, driver: Driver, slot: int) -> None:
        want = self.alone(driver, slot)
        got = driver.feed(
            Piece(1, OTHER[:50], 0), Piece(2, PROMPT[:80], slot), Piece(3, OTHER[:7], 1)
        )[1]
        assert torch.equal(got, want[80])
        for at in range(80, 93):
            pieces = [
                Piece(3, [OTHER[at - 70]], 1),
                Piece(2, PROMPT[at : at + 1], slot),
                Piece(1, [OTHER[at - 30]], 0),
            ]
            if at % 4 == 1:  # else all are decodes
                pieces.append(Piece(100 + at, OTHER[: at - 20], -1))
            assert torch.equal(driver.feed(*pieces)[1], want[at + 1])

    def test_in_chunks(self, driver: Driver, slot: int) -> None:
        want = self.alone(driver, slot)
        for at, size in ((0, 17), (17, 1), (18, 40), (58, 22), (80, 4), (84, 9)):
            (got,) = driver.feed(Piece(1, PROMPT[at : at + size], slot))
            if at + size in want:
                assert torch.equal(got, want[at + size])

    def test_after_a_cached_prefix(self, driver: Driver, slot: int) -> None:
        want = self.alone(driver, slot)
        driver.share_prefix(1, owner=0, blocks=4)
        assert torch.equal(driver.feed(Piece(1, PROMPT[64:80], slot))[0], want[80])

    def test_after_a_preemption(self, driver: Driver, slot: int) -> None:
        want = self.alone(driver, slot)
        driver.feed(Piece(1, PROMPT[:85], slot), Piece(2, OTHER, -1))
        driver.close(1)
        driver.feed(Piece(3, OTHER[:40], 1))
        assert torch.equal(driver.feed(Piece(1, PROMPT[:90], slot))[0], want[90])


def test_long_contexts_keep_their_bits_however_their_splits_are_shared_out(tmp_path: Path) -> None:
    """On CUDA a prompt's rows attend split after split, and a decode's splits are merged later."""
    write_gguf(make_llama(seed=5, max_position_embeddings=512), tmp_path / "base.gguf", "Q4_1")
    driver = CudaDriver(
        tmp_path / "base.gguf", tmp_path, batch_invariant=True,
        **{**OPTIONS["cuda"], "max_batch_tokens": 384},
    )  # fmt: skip
    tokens = [(7 * index * index + 3) % 96 for index in range(301)]
    driver.feed(Piece(0, tokens[:300]))
    (decoded,) = driver.feed(Piece(0, tokens[300:]))
    assert torch.equal(driver.feed(Piece(1, tokens))[0], decoded)
    driver.feed(Piece(2, tokens[:290]))
    got = driver.feed(Piece(3, OTHER[:9]), Piece(2, tokens[290:]), Piece(4, OTHER))[1]
    assert torch.equal(got, decoded)


def test_a_product_that_depends_on_the_batch_is_noticed(base) -> None:
    weight = open_checkpoint(base[0]["F32"]).weight("model.layers.0.mlp.down_proj.weight")
    linear = Linear([weight], choose_path("auto", batch_invariant=True, fast_bf16=False))
    assert rows_are_stable(linear)

    class Unstable(Linear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return super().__call__(x) * (1.0 + 1e-6 * (x.shape[0] == 7))

    unstable = Unstable([weight], choose_path("auto", batch_invariant=True, fast_bf16=False))
    assert not rows_are_stable(unstable)
    assert not make_rows_stable([unstable])


def test_the_smallest_batches_are_padded_where_their_sums_are_split_otherwise(base) -> None:
    class OneRowDiffers(Linear):
        computed = 1

        def compute_at_least(self, rows: int) -> None:
            self.computed = rows
            super().compute_at_least(rows)

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            alone = max(self.computed, x.shape[0]) == 1
            return super().__call__(x) * (1.0 + 1e-6 * alone)

    weight = open_checkpoint(base[0]["F32"]).weight("model.layers.0.mlp.down_proj.weight")
    linear = OneRowDiffers([weight], choose_path("auto", batch_invariant=True, fast_bf16=False))
    other = OneRowDiffers([weight], choose_path("auto", batch_invariant=True, fast_bf16=False))
    assert not rows_are_stable(linear)
    assert make_rows_stable([linear, other])
    assert linear.computed == other.computed == 2  # every layer's, not the tried one's alone
