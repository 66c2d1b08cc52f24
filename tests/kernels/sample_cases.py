"""Rows of logits and what they ask for."""

import itertools
from dataclasses import dataclass

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


@dataclass(frozen=True)
class SampleCase:
    """Rows of one vocabulary; a row is the kind of its logits and what it asks for."""

    vocab: int
    rows: tuple[tuple[str, Draw | None], ...]
    seed: int = 0

    def logits(self) -> Tensor:
        """[R, vocab]; behind each row and after the last lie NaN."""
        generator = torch.Generator().manual_seed(self.seed)
        wide = torch.full((len(self.rows) + 1, self.vocab + 5), torch.nan)
        for row, (kind, _) in zip(wide[:, : self.vocab], self.rows, strict=False):
            row.copy_(torch.randn(self.vocab, generator=generator) * 3)
            forbidden = torch.rand(self.vocab, generator=generator) < 0.2
            place = int(torch.randint(self.vocab, (1,), generator=generator))
            if kind == "ties":
                row.round_()
            if kind in ("one token", "no token"):
                forbidden[:] = True
            if kind == "one token":
                forbidden[place] = False
            row[forbidden] = -torch.inf
            if kind in ("nan", "inf"):
                row[place] = float(kind)
        return wide[:-1, : self.vocab]

    def asked(self) -> Tensor:
        """`parameters`, contiguous, and NaN behind them."""
        table = torch.from_numpy(parameters([draw for _, draw in self.rows]))
        return torch.cat((table, torch.full((1, table.shape[1]), torch.nan)))[:-1]

    def wrong(self, face) -> list[int]:
        """Rows whose token is not the reference's, nor the reference's a rounding away.

        A rounding: the sums of a row in fp32 may put a number, or the end of top-p, that lies
        within 1e-5 of an edge on its other side.
        """
        logits, asked = self.logits(), self.asked()
        actual = face.sample(logits, asked)
        assert (actual.dtype, actual.shape) == (torch.int64, (len(self.rows),))
        right = torch.zeros(len(self.rows), dtype=torch.bool)
        for number, top_p in itertools.product((0, -1e-5, 1e-5), repeat=2):
            near = asked.clone()
            near[:, 0] = (near[:, 0] + number).clamp(0, 1)
            near[:, 3] = torch.where(near[:, 3] < 1, near[:, 3] * (1 + top_p), near[:, 3])
            right |= actual == reference.sample(logits, near)
        return torch.nonzero(~right)[:, 0].tolist()
