"""Every format of every architecture and rope scaling, against transformers' logits and PEFT's.

transformers runs the weights that the format's codes stand for; the engine reads the checkpoint
itself. In the normal run each format, architecture and scaling comes once; in the wide one every
two of them come together.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.checkpoint_formats import FORMATS
from tests.model_factories import (
    ALL_TARGETS,
    make_adapter,
    make_model,
    read_blob,
    with_adapter,
)
from tests.parity.driver import Driver, Piece, reference_logits

PROMPT = [(7 * index * index + 3 * index + 5) % 96 for index in range(75)]
ARCHITECTURES: dict[str, Any] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 21}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": False}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32}),
}
ROPES: dict[str, dict[str, Any]] = {
    "none": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
}  # fmt: skip
K_SHAPE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
"""GGUF's K formats want rows of a multiple of 256."""
ONCE = dict.fromkeys(
    [
        *((kind, "llama", "none") for kind in FORMATS),
        *(("compressed-tensors int4", architecture, "none") for architecture in ARCHITECTURES),
        *(("GGUF Q4_1", architecture, "none") for architecture in ARCHITECTURES),
        *(("awq", "llama", rope) for rope in ROPES),
        *(("GGUF Q8_0", "qwen2", rope) for rope in ROPES),
    ]
)
PAIRS = [
    pytest.param(kind, architecture, rope, marks=pytest.mark.wide)
    for row, kind in enumerate(FORMATS)
    for column, architecture in enumerate(ARCHITECTURES)
    for rope in [list(ROPES)[(row + column) % len(ROPES)]]
    if (kind, architecture, rope) not in ONCE
]


def random_model(kind: str, architecture: str, rope: str) -> Any:
    model, config, changes = ARCHITECTURES[architecture]
    shape = K_SHAPE if kind.endswith("_K") else {}
    parameters = {"rope_theta": 500.0, **ROPES[rope]}
    return make_model(model, config, seed=6, rope_parameters=parameters, **{**changes, **shape})


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert want.std() > 0.3, "the reference must say something"
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize(("kind", "architecture", "rope"), [*ONCE, *PAIRS])
def test_logits_are_transformers_own_on_the_weights_that_the_codes_stand_for(
    tmp_path: Path, kind: str, architecture: str, rope: str
) -> None:
    served = FORMATS[kind](random_model(kind, architecture, rope), tmp_path / "base")
    driver, at = Driver(served.path, tmp_path), 0
    want = reference_logits(served.model, PROMPT)
    for size in (40, 1, 34):
        (got,) = driver.feed(Piece(0, PROMPT[at : at + size]))
        at += size
        assert_close(got, want[at - 1])


@pytest.mark.parametrize("kind", FORMATS)
def test_adapters_on_a_quantized_base_give_pefts_logits(tmp_path: Path, kind: str) -> None:
    served = FORMATS[kind](random_model(kind, "llama", "none"), tmp_path / "base")
    driver = Driver(served.path, tmp_path)
    wanted = [reference_logits(served.model, PROMPT)[-1]]
    for slot, rank in enumerate((4, 12)):
        adapter = make_adapter(
            served.model, tmp_path / f"a{rank}", seed=rank, r=rank, target_modules=ALL_TARGETS
        )
        driver.add_adapter(slot, read_blob(adapter, driver.executor.description))
        wanted.append(reference_logits(with_adapter(served.model, adapter), PROMPT)[-1])
    driver.feed(*(Piece(slot + 1, PROMPT[:60], slot) for slot in (-1, 0, 1)))
    got = driver.feed(*(Piece(slot + 1, PROMPT[60:], slot) for slot in (-1, 0, 1)))
    for have, want in zip(got, wanted, strict=True):
        assert_close(have, want)
    assert (wanted[1] - wanted[0]).abs().max() > 0.01


@pytest.mark.parametrize("kind", FORMATS)
def test_the_paths_that_serve_stay_near_the_codes(tmp_path: Path, kind: str) -> None:
    """bf16 activations, scales and products: near, wherever a format has a 4-bit path or none."""
    served = FORMATS[kind](random_model(kind, "llama", "none"), tmp_path / "base")
    want = reference_logits(served.model, PROMPT)[-1]
    for path in ("int4", "dense", "native"):
        driver = Driver(served.path, tmp_path, linear_path=path)
        (got,) = driver.feed(Piece(0, PROMPT))
        assert ((got - want).norm() / want.norm()).item() < 0.04
