"""Draws the tokens of a batch on the device that holds its logits.

One small transfer brings what every row asks for, one brings the tokens back: nothing waits for a
single row. The faces: Triton (`sample_triton`) on a GPU, `engine.draws` elsewhere, and the plain
`reference.sample`. All of them draw by one uniform number a row, over the vocabulary in order or,
where top-k is asked for, over the likeliest tokens in falling order: so one seed draws one token.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.draws import Draw, draw

PARAMETERS = 5


def parameters(draws: Sequence[Draw | None]) -> npt.NDArray[np.float32]:
    """[R, 5] of the rows: number, temperature, top_k, top_p, min_p. None is a greedy row."""
    greedy = (0.0, 0.0, 0, 1.0, 0.0)
    rows = [
        greedy if d is None else (d.number, d.temperature, d.top_k, d.top_p, d.min_p) for d in draws
    ]
    return np.array(rows, np.float32).reshape(-1, PARAMETERS)


def sample(logits: Tensor, asked: Tensor) -> Tensor:
    """A token for every row: [R] int64, on the device of the logits.

    logits: [R, vocab], rows contiguous; a token of -inf is never drawn. asked: `parameters`, on the
    same device. A row with a NaN or an infinity among its logits, or nothing to draw, gets -1.
    """
    if logits.is_cuda:
        from engine.kernels import sample_triton

        return sample_triton.sample(logits, asked)
    largest = logits.amax(dim=-1)
    good = torch.isfinite(largest)  # amax hands a NaN on
    tokens = torch.where(good, logits.argmax(dim=-1), -1)
    drawn = torch.nonzero(good & (asked[:, 1] > 0))[:, 0]
    if len(drawn):
        rows = asked[drawn].tolist()
        draws = [Draw(n, t, int(k), top_p, min_p) for n, t, k, top_p, min_p in rows]
        tokens[drawn] = draw(logits[drawn].float(), draws)
    return tokens
