"""Which shapes a step may have: the one rule for padding, graphs and warm-up.

Every step is padded to one of a few sizes, and every size is run before the engine is ready: so no
step compiles a kernel, captures a graph or asks for more memory. Steps of decodes replay the graph
of their size, of their largest rank's class, and of the class of their chunks, which are up to 16
rows of one adapter: kernels start programs for the most of a class, and too many that end at once
would cost more than the work. Which adapters they use is data that the graph reads. Steps with
prompt chunks run eagerly.

Imports no torch.
"""

from bisect import bisect_left
from dataclasses import dataclass

RANK_CLASSES = (16, 64)
"""Ranks up to which the shrink starts programs, beside none and the largest rank of all."""
CHUNK_ROWS = 16
"""Of a decode step's chunks, as `engine.kernels.lora_triton` cuts them."""
MOST_GRAPH_ROWS = 256
"""Larger decode batches gain little from a graph: their kernels outlast their launches."""


@dataclass(frozen=True, slots=True, order=True)
class StepKey:
    """The shape of a step as the device sees it."""

    rows: int  # padded
    rank: int  # the class: no row's adapter has a larger rank; 0: no row has one
    chunks: int  # the class; 0 without adapters, and where a step runs eagerly
    captured: bool


@dataclass(frozen=True, slots=True)
class StepKeys:
    """All shapes of an engine. `graph_rows`, `eager_rows` and `ranks` ascend."""

    graph_rows: tuple[int, ...]
    eager_rows: tuple[int, ...]
    sample_rows: tuple[int, ...]
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, *, max_running: int, max_batch_tokens: int, max_rank: int) -> "StepKeys":
        return cls(
            graph_rows=_sizes(min(max_running, MOST_GRAPH_ROWS), ((1, 1), (2, 2), (8, 4), (32, 8),
                                                                 (128, 16), (512, 32))),
            eager_rows=_sizes(max_batch_tokens, ((16, 16), (64, 32), (512, 64), (2048, 128),
                                                 (1 << 30, 256))),
            sample_rows=_sizes(max_running, ((1, 1), (8, 8), (64, 16), (1 << 30, 64))),
            ranks=(0, *(rank for rank in RANK_CLASSES if rank < max_rank), max_rank),
        )  # fmt: skip

    def key(self, rows: int, rank: int, chunks: int, *, decodes: bool) -> StepKey:
        """The shape that a step of so many rows takes.

        `rank`: the largest of its adapters', 0 without one; `chunks`: of at most CHUNK_ROWS of its
        rows. `decodes`: every row is one token of a sequence of its own, for which the next is
        drawn. Raises ValueError when there is none.
        """
        rank = _at_least(self.ranks, rank, "rank")
        if decodes and rows <= self.graph_rows[-1]:
            padded = _at_least(self.graph_rows, rows, "rows")
            chunks = _at_least(chunk_classes(padded), chunks, "chunks") if rank else 0
            return StepKey(padded, rank, chunks, captured=True)
        rank = self.ranks[-1] if rank else 0  # what is started is known then, and needs no class
        return StepKey(_at_least(self.eager_rows, rows, "rows"), rank, 0, captured=False)

    def padded_samples(self, rows: int) -> int:
        """To how many rows the logits of so many are padded."""
        return _at_least(self.sample_rows, rows, "rows")

    def captured(self) -> list[StepKey]:
        """Every graph, the largest first: the others then fit into its memory."""
        return [
            StepKey(rows, rank, chunks, captured=True)
            for rows in reversed(self.graph_rows)
            for rank in reversed(self.ranks)
            for chunks in (reversed(chunk_classes(rows)) if rank else (0,))
        ]

    def eager(self) -> list[StepKey]:
        """Every shape that runs eagerly, the largest first."""
        return [
            StepKey(rows, rank, 0, captured=False)
            for rows in reversed(self.eager_rows)
            for rank in (self.ranks[-1], 0)
        ]


def chunk_classes(rows: int) -> tuple[int, ...]:
    """Bounds of the chunks that `rows` rows are cut into: all of few adapters, some, any at all."""
    return tuple(sorted({-(-rows // CHUNK_ROWS), -(-rows // 4), rows}))


def _sizes(most: int, steps: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """Sizes up to `most`, the last of them: up to each bound of `steps` multiples of its step."""
    sizes: list[int] = []
    at = 0
    for bound, step in steps:
        while at < min(bound, most):
            at = (at // step + 1) * step
            sizes.append(min(at, most))
    return tuple(sizes)


def _at_least(sizes: tuple[int, ...], wanted: int, what: str) -> int:
    index = bisect_left(sizes, wanted)
    if index == len(sizes):
        raise ValueError(f"{wanted} {what} exceed the largest step's {sizes[-1]}")
    return sizes[index]
