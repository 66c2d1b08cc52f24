"""Draws tokens on the device in two halves: what is put onto the stream, and what is read later.

The order for a row is that of `engine.sampler`. Between the halves the host goes on; only rows
whose penalties or grammar look at their last token must be read before their next draw is put on.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.grammar import MatcherSource
from engine.kernels.sample import parameters
from engine.sampler import Sampled, Sampler, draw_of, report


@dataclass(frozen=True, slots=True)
class Drawing:
    """Draws that are under way, a row a sequence."""

    seqs: list[int]
    stuck: set[int]  # rows whose grammar outgrew its bounds
    reported: list[int]  # rows whose log probabilities are wanted
    logprobs: Tensor  # fp32 [reported, vocab], before grammar and temperature


class DeviceSampler(Sampler):
    """The sampling state of running sequences. `begin`, `adjust`, `finish`: once a step each."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        grammars: MatcherSource | None,
        draw: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        """`draw`: a face of `engine.kernels.sample.sample`."""
        super().__init__(vocab_size, eos_token_ids, grammars)
        self._draw = draw

    def parameters(self, seqs: list[int]) -> npt.NDArray[np.float32]:
        """[R, 5], what the next draws ask for; see kernels.sample."""
        return parameters([draw_of(self._sequences[seq]) for seq in seqs])

    def adjust(self, logits: Tensor, seqs: list[int]) -> Drawing:
        """Applies penalties, bias and grammars in place, and takes log probabilities on the way.

        logits: [R, vocab] fp32, row i of sequence seqs[i]. From now on each sequence stands at its
        next position.
        """
        sequences = [self._sequences[seq] for seq in seqs]
        self._adjust(logits, sequences)
        wanted = [row for row, s in enumerate(sequences) if s.params.logprobs is not None]
        logprobs = torch.log_softmax(logits[wanted], dim=-1) if wanted else logits[:0]
        stuck = self._mask(logits, sequences)
        for sequence in sequences:
            sequence.position += 1
        return Drawing(list(seqs), stuck, wanted, logprobs)

    def draw(self, logits: Tensor, lowest: Tensor, asked: Tensor) -> Tensor:
        """The tokens, [R] int64 on the device; -1 where a logit was no finite number.

        lowest: [R], each row's smallest logit before `adjust`: the draw itself sees no -inf.
        """
        tokens = self._draw(logits, asked)
        return torch.where(torch.isfinite(lowest), tokens, -1)

    def finish(self, drawing: Drawing, tokens: list[int]) -> list[Sampled]:
        """The drawn tokens as results, recorded into their sequences. `tokens`: read back."""
        rows = [row for row in drawing.reported if tokens[row] >= 0]
        kept = [at for at, row in enumerate(drawing.reported) if tokens[row] >= 0]
        widths = [self._width(drawing.seqs[row]) for row in rows]
        logprobs = (
            drawing.logprobs if len(kept) == len(drawing.reported) else drawing.logprobs[kept]
        )
        reported = dict(
            zip(rows, report(logprobs, [tokens[row] for row in rows], widths), strict=True)
        )
        results = []
        for row, (seq, token) in enumerate(zip(drawing.seqs, tokens, strict=True)):
            if token < 0:
                results.append(Sampled(-1, None, False))
            elif row in drawing.stuck:
                results.append(Sampled(-1, None, True, stuck=True))
            else:
                sequence = self._sequences.get(seq)
                if sequence is not None:  # else it was closed while the draw was under way
                    sequence.take(token)
                results.append(Sampled(token, reported.get(row), True))
        return results

    def _width(self, seq: int) -> int:
        sequence = self._sequences.get(seq)
        return 0 if sequence is None else sequence.params.logprobs or 0
