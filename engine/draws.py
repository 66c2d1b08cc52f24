"""Random draws that depend on (seed, choice, position) and the row's own logits, nothing else.

One uniform number a token picks from the cumulative distribution, so a row's token does not change
with its batch mates, their order, or a preemption in between.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_WORD = (1 << 64) - 1


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1): the same for the same arguments on every machine.

    Counter-based: three rounds of splitmix64's mixer (Steele et al., 2014), one an argument.
    """
    state = 0
    for word in (seed, choice, position):
        state = (state + word + 0x9E3779B97F4A7C15) & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
        state ^= state >> 31
    return (state >> 11) / (1 << 53)


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row asks for; `number` is its uniform number."""

    number: float
    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @property
    def sorts(self) -> bool:
        """Whether the likeliest tokens must be found in order."""
        return self.top_k > 0 or self.top_p < 1.0


def draw(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """A token for every row: temperature, then top-k, top-p and min-p, then the draw.

    logits: [R, vocab] fp32, overwritten; returns [R] int64. A token of -inf is never drawn.
    """
    device = logits.device
    temperatures = torch.tensor([d.temperature for d in draws], device=device)
    logits -= logits.amax(dim=-1, keepdim=True)
    logits /= temperatures[:, None]
    tokens = torch.empty(len(draws), dtype=torch.int64, device=device)
    plain = [row for row, d in enumerate(draws) if not d.sorts]
    if plain:
        tokens[plain] = _from_all(_rows(logits, plain), [draws[row] for row in plain])
    by_width: dict[int, list[int]] = defaultdict(list)
    for row, d in enumerate(draws):
        if d.sorts:
            by_width[min(d.top_k, logits.shape[1])].append(row)
    for width, rows in by_width.items():
        chosen = [draws[row] for row in rows]
        pick = _from_likeliest if width else _from_nucleus
        tokens[rows] = pick(_rows(logits, rows), chosen, width)
    return tokens


def _rows(logits: Tensor, rows: list[int]) -> Tensor:
    return logits if len(rows) == logits.shape[0] else logits[rows]


def _from_all(scaled: Tensor, draws: list[Draw]) -> Tensor:
    """scaled: [n, vocab], at most 0 in every row."""
    if any(d.min_p > 0 for d in draws):
        scaled = scaled.masked_fill(scaled < _log_min_p(draws, scaled), -torch.inf)
    return _invert(torch.exp(scaled), draws)


def _from_likeliest(scaled: Tensor, draws: list[Draw], width: int) -> Tensor:
    """Exactly the `width` likeliest tokens, of which top-p keeps a part of their own mass."""
    values, tokens = scaled.topk(width, dim=-1)
    weights = torch.exp(values)
    kept = _keep(values, weights, weights.sum(dim=-1, keepdim=True), draws)
    return tokens.gather(1, _invert(kept, draws)[:, None])[:, 0]


def _from_nucleus(scaled: Tensor, draws: list[Draw], _: int) -> Tensor:
    """The smallest set of the likeliest tokens that holds top-p; ties at its edge all stay."""
    ascending = _ascending(scaled)
    mass = torch.exp(ascending).cumsum(dim=-1)
    rest = 1.0 - torch.tensor([[d.top_p] for d in draws], dtype=torch.float64, device=mass.device)
    outside = (mass <= rest * mass[:, -1:]).sum(dim=-1, keepdim=True)
    edge = ascending.gather(1, outside.clamp(max=scaled.shape[1] - 1))
    return _from_all(scaled.masked_fill(scaled < edge, -torch.inf), draws)


def _ascending(values: Tensor) -> Tensor:
    """Sorted rows. On the CPU by numpy, which is many times faster where no index is wanted."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy(), axis=-1))
    return values.sort(dim=-1).values


def _keep(values: Tensor, weights: Tensor, total: Tensor, draws: list[Draw]) -> Tensor:
    """Weights in falling order with those outside top-p and min-p set to 0; the first stays."""
    top_p = torch.tensor([[d.top_p] for d in draws], device=values.device)
    before = weights.cumsum(dim=-1) - weights
    outside = (before >= top_p * total) | (values < _log_min_p(draws, values))
    outside[:, 0] = False
    return weights.masked_fill(outside, 0.0)


def _log_min_p(draws: list[Draw], like: Tensor) -> Tensor:
    return torch.tensor([[d.min_p] for d in draws], device=like.device).log()


def _invert(weights: Tensor, draws: list[Draw]) -> Tensor:
    """The first index whose cumulative weight exceeds the row's number times the total."""
    sums = weights.cumsum(dim=-1)
    total = sums[:, -1:]
    numbers = torch.tensor([[d.number] for d in draws], device=weights.device)
    below = torch.nextafter(total, torch.zeros_like(total))
    return torch.searchsorted(sums, torch.minimum(numbers * total, below), right=True)[:, 0]
