"""One mixed batch of adapters against PEFT with each adapter alone, in fp32."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model_factories import (
    ALL_TARGETS,
    make_adapter,
    make_llama,
    read_blob,
    save_folder,
    with_adapter,
)
from tests.parity.driver import Driver, Piece, reference_logits

TARGETS = {
    "one": ["v_proj"],
    "some": ["q_proj", "o_proj", "up_proj"],
    "all": ALL_TARGETS,
    "embedding": ["embed_tokens", "q_proj"],
    "head": ["lm_head", "down_proj"],
    "edges": ["embed_tokens", "lm_head"],
}
VARIANTS: dict[str, dict[str, Any]] = {
    "rank_pattern": {
        "r": 8, "target_modules": ALL_TARGETS, "rank_pattern": {"q_proj": 3, "1.mlp.up_proj": 17},
    },
    "alpha_pattern": {
        "r": 8, "lora_alpha": 16, "target_modules": ALL_TARGETS,
        "alpha_pattern": {"v_proj": 4, "down_proj": 40},
    },
    "rslora": {"r": 64, "lora_alpha": 32, "use_rslora": True, "target_modules": ALL_TARGETS},
    "rslora with patterns": {
        "r": 4, "use_rslora": True, "target_modules": ["q_proj", "k_proj", "gate_proj"],
        "rank_pattern": {"k_proj": 9}, "alpha_pattern": {"gate_proj": 3},
    },
    "layers_to_transform": {"r": 8, "target_modules": ALL_TARGETS, "layers_to_transform": [0, 2]},
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory):
    # An untied head: PEFT and the engine agree on lm_head for either, and this tells them apart.
    model = make_llama(seed=11, tie_word_embeddings=False)
    return model, save_folder(model, tmp_path_factory.mktemp("base"))


@pytest.fixture
def driver(base, tmp_path: Path) -> Driver:
    return Driver(base[1], tmp_path)


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 31 + index * (index + seed) * 7) % 96 for index in range(length)]


def assert_equal_to_peft(base_model, driver: Driver, folders: list[Path]) -> None:
    """All adapters and the base in shared steps (prefill, chunk, decodes) equal PEFT's logits."""
    for slot, folder in enumerate(folders):
        driver.add_adapter(slot, read_blob(folder, driver.executor.description))
    slots = [-1, *range(len(folders))]
    prompts = {slot: prompt(slot + 2, 25 + 5 * slot) for slot in slots}
    oracles = [*(with_adapter(base_model, folder) for folder in folders), base_model]
    wanted = {slot: reference_logits(oracles[slot], prompts[slot]) for slot in slots}
    base_logits = {slot: reference_logits(base_model, prompts[slot]) for slot in slots}
    at = dict.fromkeys(slots, 0)
    for size in (11, 6, 1, 1):
        pieces = [Piece(slot, prompts[slot][at[slot] : at[slot] + size], slot) for slot in slots]
        for slot, got in zip(slots, driver.feed(*pieces), strict=True):
            at[slot] += size
            want = wanted[slot][at[slot] - 1]
            torch.testing.assert_close(got, want, atol=1e-4, rtol=0.0)
            if slot >= 0:
                assert (want - base_logits[slot][at[slot] - 1]).abs().max() > 0.01


@pytest.mark.parametrize("targets", TARGETS)
def test_ranks_1_8_16_64_in_one_batch_equal_peft(
    base, driver: Driver, tmp_path: Path, targets: str
) -> None:
    folders = [
        make_adapter(
            base[0], tmp_path / f"r{rank}", seed=rank, r=rank, lora_alpha=2 * rank,
            target_modules=TARGETS[targets],
        )
        for rank in (1, 8, 16, 64)
    ]  # fmt: skip
    assert_equal_to_peft(base[0], driver, folders)


def test_every_variant_in_one_batch_equals_peft(base, driver: Driver, tmp_path: Path) -> None:
    folders = [
        make_adapter(base[0], tmp_path / str(index), seed=index, **config)
        for index, config in enumerate(VARIANTS.values())
    ]
    assert_equal_to_peft(base[0], driver, folders)


def test_a_tied_head_takes_its_own_adapter(tmp_path: Path) -> None:
    model = make_llama(seed=12)
    driver = Driver(save_folder(model, tmp_path / "base"), tmp_path)
    targets = [["lm_head"], ["q_proj"], ["v_proj", "lm_head"]]
    folders = [
        make_adapter(model, tmp_path / f"a{index}", seed=index, r=4, target_modules=names)
        for index, names in enumerate(targets)
    ]
    assert_equal_to_peft(model, driver, folders)


def test_every_row_order_gives_each_adapter_the_same_answer(
    base, driver: Driver, tmp_path: Path
) -> None:
    slots = [0, 1, 2, -1]
    for slot, rank in zip(slots[:3], (2, 8, 64), strict=True):
        folder = make_adapter(
            base[0], tmp_path / str(slot), seed=slot, r=rank, target_modules=ALL_TARGETS
        )
        driver.add_adapter(slot, read_blob(folder, driver.executor.description))
    oracles = {slot: with_adapter(base[0], tmp_path / str(slot)) for slot in slots[:3]}
    wanted = {
        slot: reference_logits(oracles.get(slot, base[0]), prompt(slot + 2, 12))[-1]
        for slot in slots
    }
    for seqs, order in enumerate(itertools.permutations(slots)):
        pieces = [Piece(10 * seqs + slot + 1, prompt(slot + 2, 12), slot) for slot in order]
        for slot, got in zip(order, driver.feed(*pieces), strict=True):
            torch.testing.assert_close(got, wanted[slot], atol=1e-4, rtol=0.0)
        for piece in pieces:
            driver.close(piece.seq)


def test_base_rows_are_bitwise_untouched_by_adapter_rows(
    base, driver: Driver, tmp_path: Path
) -> None:
    folder = make_adapter(base[0], tmp_path / "a", seed=1, r=16, target_modules=ALL_TARGETS)
    driver.add_adapter(0, read_blob(folder, driver.executor.description))
    beside_base = driver.feed(Piece(0, prompt(1, 20)), Piece(1, prompt(2, 20)))
    beside_adapter = driver.feed(Piece(2, prompt(1, 20)), Piece(3, prompt(2, 20), slot=0))
    assert torch.equal(beside_base[0], beside_adapter[0])
    assert not torch.equal(beside_base[1], beside_adapter[1])


def test_an_adapter_answers_the_same_from_another_place_in_the_arena(
    base, driver: Driver, tmp_path: Path
) -> None:
    folder = make_adapter(base[0], tmp_path / "a", seed=1, r=16, target_modules=ALL_TARGETS)
    blob = read_blob(folder, driver.executor.description)
    driver.add_adapter(0, blob)
    before = driver.feed(Piece(0, prompt(1, 20), slot=0))[0]
    first = driver.executor.extent_count // 2
    driver.executor.move_adapter(0, first)
    driver.executor.move_adapter(0, first + 1)  # overlaps the place before
    other = make_adapter(base[0], tmp_path / "b", seed=2, r=16, target_modules=ALL_TARGETS)
    top = driver.executor.extent_count - -(-blob.layout.nbytes // driver.extent_bytes)
    driver.executor.start_copy(1, top, read_blob(other, driver.executor.description))
    assert driver.executor.poll_copies(blob.layout.nbytes) == [1]  # over the first place
    assert torch.equal(before, driver.feed(Piece(1, prompt(1, 20), slot=0))[0])
    driver.executor.drop_adapter(0)
    driver.executor.start_copy(5, first + 3, blob)
    assert driver.executor.poll_copies(1000) == []
    assert driver.executor.poll_copies(blob.layout.nbytes) == [5]
    assert torch.equal(before, driver.feed(Piece(2, prompt(1, 20), slot=5))[0])
