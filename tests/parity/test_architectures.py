"""Every architecture that is served, against transformers' own and PEFT's, in fp32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.model_factories import (
    ALL_TARGETS,
    make_adapter,
    make_model,
    read_blob,
    save_folder,
    with_adapter,
)
from tests.parity.driver import Driver, Piece, reference_logits

PROMPT = [(7 * index * index + 3 * index + 5) % 96 for index in range(75)]
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
BASES: dict[str, Any] = {
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "mistral with a window": (MistralForCausalLM, MistralConfig, {"sliding_window": 21}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2 with yarn": (Qwen2ForCausalLM, Qwen2Config, {"rope_parameters": YARN}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32}),
}


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert want.std() > 0.3, "the reference must say something"
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0.0)


@pytest.fixture(params=BASES, scope="module")
def model(request: pytest.FixtureRequest) -> Any:
    kind, config, changes = BASES[request.param]
    return make_model(kind, config, seed=6, **changes)


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(model, tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("invariant", [False, True], ids=["default", "batch invariant"])
def test_prefill_chunks_and_decodes_give_transformers_logits(
    model: Any, folder: Path, tmp_path: Path, invariant: bool
) -> None:
    driver = Driver(folder, tmp_path, batch_invariant=invariant)
    want, at = reference_logits(model, PROMPT), 0
    for size in (40, 1, 1, 2, 25, 1, 5):
        got = driver.feed(Piece(0, PROMPT[at : at + size]), Piece(1, PROMPT[at : at + 3]))[0]
        at += size
        assert_close(got, want[at - 1])


def test_a_mixed_batch_of_adapters_gives_pefts_logits(
    model: Any, folder: Path, tmp_path: Path
) -> None:
    driver, wanted = Driver(folder, tmp_path), [reference_logits(model, PROMPT)[-1]]
    for slot, rank in enumerate((4, 12)):
        adapter = make_adapter(
            model, tmp_path / f"a{rank}", seed=rank, r=rank, target_modules=ALL_TARGETS
        )
        driver.add_adapter(slot, read_blob(adapter, driver.executor.description))
        wanted.append(reference_logits(with_adapter(model, adapter), PROMPT)[-1])
    driver.feed(*(Piece(slot + 1, PROMPT[:60], slot) for slot in (-1, 0, 1)))
    got = driver.feed(*(Piece(slot + 1, PROMPT[60:], slot) for slot in (-1, 0, 1)))
    for have, want in zip(got, wanted, strict=True):
        assert_close(have, want)
