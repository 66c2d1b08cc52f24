"""Rows of logits and what they ask for."""

import numpy as np
import torch
from torch import Tensor

from engine.draws import Draw
from engine.kernels import reference
from engine.kernels.sample import parameters

PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
ASKED = {
    "greedy": None,
    "plain": PLAIN,
    "cold": {**PLAIN, "temperature": 0.3},
    "min-p": {**PLAIN, "min_p": 0.1},
    "min-p of one": {**PLAIN, "min_p": 1.0},
    "top-p": {**PLAIN, "top_p": 0.8},
    "a sliver of top-p": {**PLAIN, "top_p": 1e-6},
    "top-k": {**PLAIN, "top_k": 7},
    "top-k of one": {**PLAIN, "top_k": 1},
    "top-k of all": {**PLAIN, "top_k": 100_000},
    "all of them": {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
}


def asked_for(name: str, rows: int, seed: int = 0) -> Tensor:
    numbers = np.random.default_rng(seed).random(rows).tolist()
    options = ASKED[name]
    return torch.from_numpy(
        parameters([None if options is None else Draw(n, **options) for n in numbers])
    )


def peaked_logits(rows: int, vocab: int, *, ties: bool) -> Tensor:
    """With some tokens forbidden; with `ties`, the likeliest are as likely as one another."""
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    if ties:
        logits = torch.where(logits > 4, logits.round(), logits)
    logits[:, ::5] = -torch.inf
    return logits


def mismatches(
    face, name: str, rows: int, vocab: int, device: str = "cpu", *, ties: bool = True
) -> int:
    """Rows whose token is not the reference's."""
    logits, asked = peaked_logits(rows, vocab, ties=ties), asked_for(name, rows)
    actual = face.sample(logits.to(device), asked.to(device))
    assert actual.dtype == torch.int64
    return int((actual.cpu() != reference.sample(logits, asked)).sum())


def broken_logits() -> tuple[Tensor, Tensor, list[int]]:
    """Rows that must draw nothing among rows that must draw their only token."""
    logits = torch.full((5, 50), -torch.inf)
    logits[0, 3], logits[1, 4], logits[3, 7], logits[4, 49] = torch.nan, torch.inf, 2.0, -1e30
    asked = torch.cat([asked_for(n, 1) for n in ("plain", "top-k", "greedy", "top-p", "greedy")])
    return logits, asked, [-1, -1, -1, 7, 49]
