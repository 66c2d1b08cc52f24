"""What every executor shares: the sequences it knows, and a plan's rows as one flattened batch."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.model.attention import QueryChunk
from engine.sampler import Sampled
from engine.types import BLOCK_TOKENS, PlanRow, RowResult, SequenceStart, TokenLogprobs

Integers = npt.NDArray[np.int64]
PromptLogprobs = tuple[list[TokenLogprobs], bool]
"""The entries of a row's own tokens, and whether every logit behind them was finite."""


class KnownSequence:
    """A sequence's known tokens and its block table."""

    def __init__(self, start: SequenceStart) -> None:
        self.tokens = [*start.prompt, *start.generated]
        self.table: Integers = np.zeros(0, np.int64)

    def append_blocks(self, blocks: list[int]) -> None:
        if blocks:
            self.table = np.append(self.table, blocks)

    def following(self, row: PlanRow) -> list[int | None]:
        """The sequence's own next token after each of the row's; None where it is not known."""
        known = self.tokens[row.start + 1 : row.start + 1 + len(row.tokens)]
        return [*known, *[None] * (len(row.tokens) - len(known))]


@dataclass(frozen=True, slots=True)
class FlatRows:
    """The rows of a step, one after the other: T tokens in all."""

    rows: list[PlanRow]
    first: list[int]  # where each row begins, and T
    tokens: Integers  # [T]
    positions: Integers  # [T]
    token_rows: Integers  # [T], where keys and values go, see KvCache
    slots: Integers  # [T], adapter slot or -1
    chunks: list[QueryChunk]

    @property
    def count(self) -> int:
        """T."""
        return self.first[-1]

    def sampling(self) -> list[tuple[PlanRow, int]]:
        """(row, its last position in the batch) of those that a token is drawn for."""
        return [
            (row, end - 1) for row, end in zip(self.rows, self.first[1:], strict=True) if row.sample
        ]

    def asking_for_prompt_logprobs(self) -> list[tuple[PlanRow, slice]]:
        """(row, its part of the batch) of those whose prompts are scored."""
        return [
            (row, slice(at, at + len(row.tokens)))
            for row, at in zip(self.rows, self.first, strict=False)
            if row.prompt_logprobs is not None
        ]


def flatten(
    rows: list[PlanRow], sequences: dict[int, KnownSequence], rows_per_block: int
) -> FlatRows:
    """One batch of a plan's rows, whose new blocks are appended to their sequences' tables.

    `rows_per_block`: see KvCache.
    """
    counts = [len(row.tokens) for row in rows]
    first = [0, *itertools.accumulate(counts)]
    chunks, positions, written = [], [], []
    for row, at in zip(rows, first, strict=False):
        sequence = sequences[row.seq]
        sequence.append_blocks(row.new_blocks)
        where = np.arange(row.start, row.start + len(row.tokens))
        positions.append(where)
        block: Integers = sequence.table[where // BLOCK_TOKENS]
        written.append(block * rows_per_block + where % BLOCK_TOKENS)
        chunks.append(QueryChunk(at, len(row.tokens), row.start, sequence.table))
    return FlatRows(
        rows=rows,
        first=first,
        tokens=np.fromiter(itertools.chain.from_iterable(row.tokens for row in rows), np.int64),
        positions=np.concatenate(positions),
        token_rows=np.concatenate(written),
        slots=np.repeat(np.array([row.slot for row in rows], np.int64), counts),
        chunks=chunks,
    )


def row_results(
    rows: Sequence[PlanRow], drawn: dict[int, Sampled], prompts: dict[int, PromptLogprobs]
) -> list[RowResult]:
    """What the rows brought back, in their order. `drawn` and `prompts` by sequence."""
    return [_result(row, drawn.get(row.seq), prompts.get(row.seq)) for row in rows]


def _result(row: PlanRow, drawn: Sampled | None, prompt: PromptLogprobs | None) -> RowResult:
    of_prompt, finite = prompt or (None, True)
    if drawn is None:
        return RowResult(row.seq, [], None, of_prompt, finite)
    if not drawn.finite:
        return RowResult(row.seq, [], None, of_prompt, finite=False)
    if drawn.stuck:
        return RowResult(row.seq, [], None, of_prompt, finite, stuck=True)
    logprobs = None if drawn.logprobs is None else [drawn.logprobs]
    return RowResult(row.seq, [drawn.token_id], logprobs, of_prompt, finite)
