"""How much one step may hold: which decodes go, and how long the prefill chunks may be.

A decode with a budget bounds the step it is in. All decodes go if they fit; if not, those with a
budget that presses go and the others take turns, none left out of more than a few steps in a row.
Prompts get what is left of the tightest gap, by the upper quantile of the step-time model.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.request import Sequence
from engine.step_time import StepShape, StepTimes

MOST_SKIPPED = 3
"""Steps in a row that a running decode may be left out of."""
LEAST_CHUNK = 16
"""A prompt's chunk is not cut below this: every chunk reads the weights once more."""
PUNCTUALITY = 0.95
"""Of the tightest gap, what a step is planned to fill: beyond the upper quantile lie surprises."""
BATCH_SHARE = 0.85
"""Of the tightest budget, what decodes alone may grow to fill: prompts need the rest."""
PATIENCE_STEPS = 16
"""Steps in a row that prompts may get nothing; then they get a least chunk."""


@dataclass(slots=True)
class Load:
    """What a step of everything that runs would hold, if all of it were decodes."""

    rows: int = 0
    kv_tokens: int = 0
    adapter_bytes: int = 0

    def add(self, sequence: Sequence) -> None:
        self.rows += 1
        self.kv_tokens += sequence.length
        self.adapter_bytes += sequence.adapter_bytes

    def shape(self, share: float = 1.0) -> StepShape:
        return StepShape(
            0,
            math.ceil(self.rows * share),
            math.ceil(self.kv_tokens * share),
            0,
            math.ceil(self.adapter_bytes * share),
        )


@dataclass(slots=True)
class Commitments:
    """Running sequences with a budget a token, which go in every step, and the others."""

    firm: Load = field(default_factory=Load)
    loose: Load = field(default_factory=Load)
    tightest_ms: float = math.inf

    def add(self, sequence: Sequence) -> None:
        tpot_ms = sequence.tpot_ms
        if tpot_ms is None:
            self.loose.add(sequence)
        else:
            self.firm.add(sequence)
            self.tightest_ms = min(self.tightest_ms, tpot_ms)

    def breaks(self, sequence: Sequence, times: StepTimes) -> bool:
        """Whether with one more running sequence a step would outlast the tightest budget."""
        tpot_ms = sequence.tpot_ms
        tightest_ms = min(self.tightest_ms, math.inf if tpot_ms is None else tpot_ms)
        if tightest_ms == math.inf or not times.known:
            return False
        return times.upper_ms(self.with_one_more(sequence)) > BATCH_SHARE * tightest_ms

    def with_one_more(self, sequence: Sequence) -> StepShape:
        """A step of the firm decodes, the new one, and the share of the loose ones that must go."""
        firm = self.firm.shape()
        loose = self.loose.shape(1.0 / (MOST_SKIPPED + 1))
        return StepShape(
            0,
            firm.decode_rows + loose.decode_rows,
            firm.kv_tokens + loose.kv_tokens,
            0,
            firm.adapter_bytes + loose.adapter_bytes,
        ).with_decode(sequence.length, sequence.adapter_bytes)


@dataclass(slots=True)
class Draft:
    """The decodes of the next step, its shape so far, and how long it may take."""

    decodes: list[Sequence]
    shape: StepShape
    limit_ms: float
    slots: set[int]  # of the adapters that it touches

    def new_bytes(self, sequence: Sequence) -> int:
        """Adapter bytes that a row of the sequence would add."""
        return 0 if sequence.slot in self.slots else sequence.adapter_bytes

    def take_chunk(self, sequence: Sequence, count: int) -> None:
        self.shape = self.shape.with_chunk(sequence.computed, count, self.new_bytes(sequence))
        self.slots.add(sequence.slot)


def draft_decodes(
    decodes: Iterable[Sequence], now_ms: float, times: StepTimes, *, budgets: bool
) -> Draft:
    """The decodes that go in the next step. `budgets`: whether they bound it."""
    chosen = list(decodes)
    gaps = {s.seq: s.gap_ms(now_ms) for s in chosen} if budgets else {}
    limit_ms = PUNCTUALITY * min(gaps.values(), default=math.inf)
    draft = _draft(chosen, limit_ms)
    if limit_ms < math.inf and times.known and times.upper_ms(draft.shape) > limit_ms:
        must = [s for s in chosen if s.skipped >= MOST_SKIPPED or gaps[s.seq] < math.inf]
        others = [s for s in chosen if s.skipped < MOST_SKIPPED and gaps[s.seq] == math.inf]
        others.sort(key=lambda s: (-s.skipped, s.last_token_ms, s.order))
        low, high = 0, len(others)  # so many of the others fit; none more than high do
        while low < high:
            middle = (low + high + 1) // 2
            if times.upper_ms(_draft(must + others[:middle], limit_ms).shape) <= limit_ms:
                low = middle
            else:
                high = middle - 1
        draft = _draft(must + others[:low], limit_ms)
    going = {s.seq for s in draft.decodes} if len(draft.decodes) < len(chosen) else None
    for sequence in chosen:
        sequence.skipped = 0 if going is None or sequence.seq in going else sequence.skipped + 1
    return draft


def _draft(decodes: list[Sequence], limit_ms: float) -> Draft:
    slots: set[int] = set()
    kv_tokens = adapter_bytes = 0
    for sequence in decodes:
        kv_tokens += sequence.computed + 1
        if sequence.slot not in slots:
            slots.add(sequence.slot)
            adapter_bytes += sequence.adapter_bytes
    return Draft(decodes, StepShape(0, len(decodes), kv_tokens, 0, adapter_bytes), limit_ms, slots)


def chunk_length(
    draft: Draft, sequence: Sequence, most: int, times: StepTimes, *, starved: bool
) -> int:
    """Tokens of the sequence's next chunk, at most `most`; 0: none fits into this step."""
    if draft.limit_ms == math.inf or not times.known:
        return most
    fits = times.largest_chunk(
        draft.shape, sequence.computed, most, draft.limit_ms, draft.new_bytes(sequence)
    )
    least = min(most, LEAST_CHUNK)
    if fits >= least:
        return fits
    return least if starved and not draft.shape.prefill_tokens else 0
