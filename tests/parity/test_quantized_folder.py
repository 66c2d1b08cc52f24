"""What `loramux quantize` writes, served: transformers' logits on the rounded weights, and how far
those are from the source's."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.loader import open_checkpoint
from engine.quantize import Options, quantize
from tests.checkpoint_formats import FORMATS
from tests.parity.driver import Driver, Piece, reference_logits
from tests.parity.test_formats import ARCHITECTURES, PROMPT, assert_close, random_model


def rounded(model: Any, folder: Path) -> Any:
    """The model with the weights that the folder's codes stand for."""
    checkpoint, served = open_checkpoint(folder), copy.deepcopy(model)
    for name, parameter in served.named_parameters():
        parameter.data = torch.from_numpy(checkpoint.weight(name).decode())
    return served


def smooth_model(architecture: str) -> Any:
    """Random weights whose attention is not a coin's toss between two tokens, as trained ones."""
    model = random_model("BF16", architecture, "none")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("q_norm", "q_proj")):
                parameter *= 0.3
    return model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "options",
    [Options(32), Options(64), Options(32, symmetric=True)],
    ids=["32", "64", "32 symmetric"],
)
def test_logits_keep_within_the_bound_of_the_rounding(
    tmp_path: Path, architecture: str, options: Options
) -> None:
    source = FORMATS["BF16"](smooth_model(architecture), tmp_path / "source")
    result = quantize(source.path, tmp_path / "target", options)
    driver = Driver(tmp_path / "target", tmp_path)
    driver.feed(Piece(0, PROMPT[:40]))
    (got,) = driver.feed(Piece(0, PROMPT[40:]))
    assert_close(got, reference_logits(rounded(source.model, tmp_path / "target"), PROMPT)[-1])
    want = reference_logits(source.model, PROMPT)[-1]
    error = ((got - want).norm() / want.norm()).item()
    # random weights have no redundancy: logits move a few times as far as weights, no more
    assert 0.5 * result.mean_error < error < 6 * result.largest_error
