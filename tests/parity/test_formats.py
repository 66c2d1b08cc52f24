"""Every format of every architecture and rope scaling, against transformers' logits and PEFT's.

transformers runs the weights that the format's codes stand for; the engine reads the checkpoint
itself. In the normal run each format, architecture and scaling comes once; in the wide one every
two of them come together.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
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

from engine.kernels import fp8
from tests.checkpoint_formats import FORMATS, Served, split_in_two
from tests.cuda_driver import CudaDriver
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


def random_model(kind: str, architecture: str, rope: str, **other: Any) -> Any:
    model, config, changes = ARCHITECTURES[architecture]
    shape = {**(K_SHAPE if kind.endswith("_K") else {}), **other}
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


PATHS = ("fp32", "int4", "dense", "native", "cuda fp32", "cuda")
OF_EACH_KIND = (
    "BF16", "awq", "gptq with act-order", "compressed-tensors fp8", "GGUF Q4_1", "GGUF Q8_0",
    "GGUF Q6_K",
)  # fmt: skip
WITH_ADAPTERS = [
    pytest.param(kind, path, marks=[] if quick else pytest.mark.wide)
    for path in PATHS
    for kind in FORMATS
    for quick in [path == "fp32" or (path in ("native", "cuda") and kind in OF_EACH_KIND)]
]
NEAR, NEAR_IN_FP8 = 0.05, 0.15
"""Differences of logits by their norm: what bf16 activations, scales and products cost; and where
activations are rounded to fp8 in both, a few to one side here and to the other there."""


def open_path(checkpoint: Path, data_dir: Path, path: str) -> Driver:
    """A path of the CPU by its name, or the CUDA runner over a device that is not there."""
    if path == "cuda":
        types = {"kv_dtype": "auto", "adapter_dtype": "auto"}
        return CudaDriver(checkpoint, data_dir, linear_path="auto", **types)
    if path == "cuda fp32":
        return CudaDriver(checkpoint, data_dir, linear_path="fp32")
    return Driver(checkpoint, data_dir, linear_path=path)


def rounding_to_fp8(model: Any) -> Any:
    """The model, whose blocks' own linears round the rows of their input as a step on CUDA does."""

    def rounded(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        rows, scale = fp8.round_rows(inputs[0])
        return rows.float() * scale

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.endswith(("_proj", "_proj.base_layer")):
            module.register_forward_pre_hook(rounded)
    return model


@dataclass(frozen=True)
class Base:
    """A checkpoint, two adapters for it, and the logits [T, vocab] of the base and of each."""

    served: Served
    adapters: list[Path]
    wanted: list[torch.Tensor]


def make_base(kind: str, folder: Path, *, in_fp8: bool = False) -> Base:
    layers = {"num_hidden_layers": 1} if in_fp8 else {}  # each more spreads what was rounded apart
    served = FORMATS[kind](random_model(kind, "llama", "none", **layers), folder / "base")
    adapters = [
        make_adapter(
            served.model, folder / f"a{rank}", seed=rank, r=rank, target_modules=ALL_TARGETS,
            strength=0.5 * (served.model.config.hidden_size / 64) ** 0.5,
        )
        for rank in (4, 12)
    ]  # fmt: skip
    oracles = [served.model, *(with_adapter(served.model, adapter) for adapter in adapters)]
    if in_fp8:
        oracles = [rounding_to_fp8(oracle) for oracle in oracles]
    return Base(served, adapters, [reference_logits(oracle, PROMPT) for oracle in oracles])


@pytest.fixture(scope="module")
def base_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Base]:
    """`make_base`, once for all the paths that serve a kind."""

    @cache
    def base_of(kind: str, *, in_fp8: bool = False) -> Base:
        return make_base(kind, tmp_path_factory.mktemp("base"), in_fp8=in_fp8)

    return base_of


@pytest.fixture(scope="module")
def split_base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    base = make_base("awq", tmp_path_factory.mktemp("split"))
    split_in_two(base.served.path)
    return base


def assert_adapters_answer_as_pefts(
    base: Base, data_dir: Path, path: str, *, in_fp8: bool = False
) -> None:
    """One mixed batch of the base and two adapters of different ranks: chunks, then a decode."""
    driver = open_path(base.served.path, data_dir, path)
    for slot, adapter in enumerate(base.adapters):
        driver.add_adapter(slot, read_blob(adapter, driver.executor.description))
    ends = [39, 73, 74]
    wanted = [logits[ends] for logits in base.wanted]
    steps = [
        driver.feed(*(Piece(row, PROMPT[start : end + 1], row - 1) for row in range(3)))
        for start, end in zip((0, 40, 74), ends, strict=True)
    ]
    for row, want in enumerate(wanted):
        got = torch.stack([step[row] for step in steps])
        if path.endswith("fp32"):
            assert_close(got, want)
        else:
            assert (got - want).norm() < (NEAR_IN_FP8 if in_fp8 else NEAR) * want.norm()
        for other in wanted[:row]:
            assert (want - other).norm() > 3 * NEAR * want.norm()


@pytest.mark.parametrize(("kind", "path"), WITH_ADAPTERS)
def test_adapters_on_a_quantized_base_give_pefts_logits(
    base_of: Callable[..., Base], tmp_path: Path, kind: str, path: str
) -> None:
    in_fp8 = path == "cuda" and "fp8" in kind
    base = base_of(kind, in_fp8=in_fp8)
    assert_adapters_answer_as_pefts(base, tmp_path, path, in_fp8=in_fp8)


@pytest.mark.parametrize("path", ["fp32", "native", "cuda"])
def test_a_quantized_base_of_several_files_is_served_as_one(
    split_base: Base, tmp_path: Path, path: str
) -> None:
    assert len(list(split_base.served.path.glob("*.safetensors"))) == 2
    assert_adapters_answer_as_pefts(split_base, tmp_path, path)


@pytest.mark.parametrize("kind", FORMATS)
def test_the_paths_that_serve_stay_near_the_codes(
    base_of: Callable[..., Base], tmp_path: Path, kind: str
) -> None:
    """bf16 activations, scales and products: near, wherever a format has a 4-bit path or none."""
    base = base_of(kind)
    want = base.wanted[0][-1]
    for path in ("int4", "dense", "native"):
        driver = Driver(base.served.path, tmp_path, linear_path=path)
        (got,) = driver.feed(Piece(0, PROMPT))
        assert ((got - want).norm() / want.norm()).item() < 0.04
