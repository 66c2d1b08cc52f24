"""Drawing tokens."""

from collections.abc import Iterator

import torch

from benchmarks import roofline
from benchmarks.kernels_parts.case import Case, Target, Trial
from engine.draws import Draw
from engine.kernels import reference, sample

DRAWS = {
    "greedy": None,
    "temperature": Draw(0.5, 1.0, 0, 1.0, 0.0),
    "top-p": Draw(0.5, 1.0, 0, 0.9, 0.0),
    "top-k, top-p": Draw(0.5, 1.0, 50, 0.9, 0.0),
}
CHECKED_ROWS = 8
NEIGHBOUR = 1e-4
"""Sums of fp32 may take a token that a random number so much lower or higher would draw."""


def cases(target: Target) -> Iterator[Case]:
    for rows in target.sizes.decodes:
        for name, draw in DRAWS.items():
            yield _case(target, name, rows, draw)


def _case(target: Target, name: str, rows: int, draw: Draw | None) -> Case:
    def opened() -> Trial:
        from engine.kernels import sample_triton

        face = sample_triton.sample if target.triton else sample.sample
        logits = 3 * torch.randn(rows, target.shape.vocabulary, device=target.device)
        asked = torch.from_numpy(sample.parameters([draw] * rows)).to(target.device)
        return Trial(
            lambda: face(logits, asked),
            lambda: wrong(
                face(logits, asked)[:CHECKED_ROWS], logits[:CHECKED_ROWS], asked[:CHECKED_ROWS]
            ),
        )

    work = roofline.sample(rows, target.shape.vocabulary)
    return Case(f"draw, {name}, {rows} rows", work, opened)


def wrong(tokens: torch.Tensor, logits: torch.Tensor, asked: torch.Tensor) -> float:
    """The share of rows whose token neither the reference draws nor one beside it."""
    tokens, logits, asked = tokens.cpu(), logits.cpu(), asked.cpu()
    low, high = asked.clone(), asked.clone()
    low[:, 0] -= NEIGHBOUR
    high[:, 0] += NEIGHBOUR
    first, due, last = (reference.sample(logits, given) for given in (low, asked, high))
    near = (tokens == first) | (tokens == due) | (tokens == last)
    in_order = (asked[:, 1] > 0) & (asked[:, 2] == 0)  # without top-k tokens are drawn by their id
    near |= in_order & (first <= tokens) & (tokens <= last)
    return float((~near).float().mean())
