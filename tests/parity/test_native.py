"""The compiled forward pass against the same weights in fp32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.types import AdapterBlob
from tests.model_factories import (
    ALL_TARGETS,
    make_adapter,
    make_llama,
    make_model,
    read_blob,
    save_folder,
    write_gguf,
)
from tests.parity.driver import Driver, Piece, reference_logits
from tests.parity.test_architectures import BASES, PROMPT

WIDE_HEADS = (LlamaForCausalLM, LlamaConfig, {
    "head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 1,
    "num_hidden_layers": 2,
})  # fmt: skip
FORMATS = ("Q4_0", "Q4_1", "Q8_0", "F16")


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Within what bf16 weights and activations cost."""
    assert want.std() > 0.3, "the reference must say something"
    assert (got - want).norm() < 0.03 * want.norm()
    assert (got - want).abs().max() > 0, "this must have been computed another way"


def native(folder: Path, data_dir: Path, **options: Any) -> Driver:
    return Driver(folder, data_dir, **{"linear_path": "native", "kv_dtype": "bf16", **options})


@pytest.mark.parametrize("name", [*BASES, "heads of 128"])
def test_chunks_and_decodes_of_every_architecture_come_near_transformers_logits(
    tmp_path: Path, name: str
) -> None:
    kind, config, changes = BASES.get(name, WIDE_HEADS)
    model = make_model(kind, config, seed=6, **changes)
    driver = native(save_folder(model, tmp_path / "base"), tmp_path)
    want, at = reference_logits(model, PROMPT), 0
    for size in (40, 1, 1, 2, 25, 1, 5):
        got = driver.feed(Piece(0, PROMPT[at : at + size]), Piece(1, PROMPT[at : at + 3]))[0]
        at += size
        assert_near(got, want[at - 1])


@pytest.mark.parametrize("stored", FORMATS)
def test_weights_of_every_format_are_read_as_what_they_stand_for(
    tmp_path: Path, stored: str
) -> None:
    served = write_gguf(make_llama(seed=8), tmp_path / "tiny.gguf", stored)
    driver = native(tmp_path / "tiny.gguf", tmp_path, kv_dtype="fp32")
    driver.feed(Piece(0, PROMPT[:33]))
    (got,) = driver.feed(Piece(0, PROMPT[33:]))
    assert_near(got, reference_logits(served, PROMPT)[-1])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    model, folder = make_llama(seed=9), tmp_path_factory.mktemp("native")
    adapters = [
        make_adapter(model, folder / f"a{rank}", seed=rank, r=rank, target_modules=targets)
        for rank, targets in ((4, ALL_TARGETS), (9, ["q_proj", "down_proj"]), (16, ALL_TARGETS))
    ]
    return save_folder(model, folder / "base"), adapters


def add_adapters(driver: Driver, folders: list[Path]) -> None:
    for slot, folder in enumerate(folders):
        driver.add_adapter(slot, read_blob(folder, driver.executor.description))


@pytest.mark.parametrize("adapter_dtype", ["fp32", "bf16"])
def test_a_mixed_batch_of_adapters_comes_near_fp32(
    base: tuple[Path, list[Path]], tmp_path: Path, adapter_dtype: str
) -> None:
    answers = []
    for path in ("fp32", "native"):
        driver = Driver(base[0], tmp_path / path, linear_path=path, adapter_dtype=adapter_dtype)
        add_adapters(driver, base[1])
        slots = (-1, 0, 1, 2, 0)
        first = driver.feed(*(Piece(i, PROMPT[: 50 + i], slot) for i, slot in enumerate(slots)))
        then = driver.feed(*(Piece(i, PROMPT[60:61], slot) for i, slot in enumerate(slots)))
        answers.append([*first, *then])
    for want, got in zip(*answers, strict=True):
        assert_near(got, want)
    assert (answers[1][0] - answers[1][1]).abs().max() > 0.1, "an adapter must change something"


def test_more_threads_than_cores_give_the_same_bits(
    base: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    answers = []
    for threads in (1, 7):
        driver = native(base[0], tmp_path / str(threads), threads=threads)
        add_adapters(driver, base[1])
        answers.append(
            driver.feed(Piece(0, PROMPT[:70], 2), Piece(1, PROMPT[:9], 0), Piece(2, PROMPT))
        )
    for one, many in zip(*answers, strict=True):
        assert torch.equal(one, many)


def test_an_adapter_that_is_no_number_spoils_its_own_rows_alone(
    base: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    driver = native(base[0], tmp_path, adapter_dtype="fp32")
    good = driver.feed(Piece(0, PROMPT[:40]))[0]
    blob = read_blob(base[1][0], driver.executor.description)
    spoilt = torch.full((blob.layout.nbytes // 4,), float("nan")).numpy().view("uint8")
    driver.add_adapter(0, AdapterBlob(blob.layout, spoilt))
    driver.feed(Piece(1, PROMPT[:40]), Piece(2, PROMPT[:40], 0))
    assert [row.finite for row in driver.results] == [True, False]
    assert torch.equal(driver.sampler.logits[1], good)


def test_a_model_of_other_sizes_is_refused_when_asked_for_and_else_served_in_torch(
    tmp_path: Path,
) -> None:
    folder = save_folder(make_llama(seed=1, intermediate_size=144), tmp_path / "base")
    with pytest.raises(ValueError, match="linear_path native"):
        native(folder, tmp_path)
    Driver(folder, tmp_path, linear_path="auto").feed(Piece(0, PROMPT[:5]))
