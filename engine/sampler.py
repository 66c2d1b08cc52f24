"""Draws every row's next token, in few batched operations.

The order for a row: repetition penalty, presence and frequency penalties, logit bias, end tokens
forbidden before `min_tokens`; then log probabilities; then the grammar's mask; then temperature,
top-k, top-p, min-p and the draw (`draws`). So a reported logprob is that of the model's
distribution with the caller's bias and penalties and before grammar, temperature and truncation: it
says the same at every temperature, 0 included, and is a finite number for what a grammar forbids.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.draws import Draw, draw, uniform
from engine.grammar import Matcher, MatcherSource
from engine.types import SamplingParams, SequenceStart, TokenLogprobs

GREEDY_BELOW = 1e-5
"""Temperatures below are greedy: the draw could not tell them from 0."""

_LARGEST = 1e30
"""Bound of an adjusted logit: no bias or penalty can make a row infinite."""


class Sampled(NamedTuple):
    """One row's token. A row with a logit that is no finite number draws none (-1), nor does a
    stuck one, whose grammar outgrew its bounds."""

    token_id: int
    logprobs: TokenLogprobs | None
    finite: bool
    stuck: bool = False


class SampledSequence:
    """What later draws of a sequence depend on."""

    def __init__(self, start: SequenceStart, matcher: Matcher | None) -> None:
        self.params = start.sampling
        self.matcher = matcher
        self.choice = start.choice
        self.position = len(start.generated)  # tokens drawn so far
        self.generated = Counter(start.generated) if _counts(start.sampling) else Counter()
        repeats = start.sampling.repetition_penalty != 1.0
        self.seen = set(start.prompt) | set(start.generated) if repeats else set()
        if matcher is not None:
            for token in start.generated:
                matcher.advance(token)

    def record(self, token: int) -> None:
        self.position += 1
        self.take(token)

    def take(self, token: int) -> None:
        """What later draws depend on beside the position."""
        if self.matcher is not None:
            self.matcher.advance(token)
        if _counts(self.params):
            self.generated[token] += 1
        if self.params.repetition_penalty != 1.0:
            self.seen.add(token)


def _counts(params: SamplingParams) -> bool:
    return params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


class Sampler:
    """The sampling state of running sequences; called by one thread."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        grammars: MatcherSource | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._eos = tuple(eos_token_ids)
        self._sequences: dict[int, SampledSequence] = {}

    def start(self, start: SequenceStart) -> None:
        """Introduces a sequence, with what it had generated before a preemption.

        Raises ValueError when a biased token is not in the vocabulary.
        """
        outside = [token for token in start.sampling.logit_bias if not self._knows(token)]
        if outside:
            raise ValueError(f"logit_bias names tokens outside the vocabulary: {outside[:5]}")
        matcher = None
        if start.grammar is not None:
            if self._grammars is None:
                raise ValueError("this sampler knows no grammars")
            matcher = self._grammars.matcher(start.grammar)
        self._sequences[start.seq] = SampledSequence(start, matcher)

    def drop(self, seq: int) -> None:
        """Forgets a sequence; one that is unknown is no error."""
        self._sequences.pop(seq, None)

    def sample(self, logits: Tensor, seqs: Sequence[int]) -> list[Sampled]:
        """A token for every row, recorded into its sequence.

        logits: [R, vocab] fp32, overwritten; row i belongs to sequence seqs[i], each at most once.
        """
        if not seqs:
            return []
        finite = finite_rows(logits)
        if not all(finite):
            kept = [row for row, good in enumerate(finite) if good]
            drawn = iter(self.sample(logits[kept], [seqs[row] for row in kept]))
            return [next(drawn) if good else Sampled(-1, None, False) for good in finite]
        sequences = [self._sequences[seq] for seq in seqs]
        self._adjust(logits, sequences)
        wanted = [row for row, s in enumerate(sequences) if s.params.logprobs is not None]
        logprobs = torch.log_softmax(logits[wanted], dim=-1) if wanted else None
        stuck = self._mask(logits, sequences)
        tokens = _choose(logits, sequences)
        reported: dict[int, TokenLogprobs] = {}
        if logprobs is not None:
            widths = [sequences[row].params.logprobs or 0 for row in wanted]
            entries = report(logprobs, [tokens[row] for row in wanted], widths)
            reported = dict(zip(wanted, entries, strict=True))
        for row, (sequence, token) in enumerate(zip(sequences, tokens, strict=True)):
            if row not in stuck:
                sequence.record(token)
        return [
            Sampled(-1, None, True, stuck=True)
            if row in stuck
            else Sampled(token, reported.get(row), True)
            for row, token in enumerate(tokens)
        ]

    def _knows(self, token: int) -> bool:
        return 0 <= token < self._vocab_size

    def _mask(self, logits: Tensor, sequences: list[SampledSequence]) -> set[int]:
        """Forbids what the rows' grammars forbid, in place; the rows that are stuck."""
        rows = [row for row, sequence in enumerate(sequences) if sequence.matcher is not None]
        if not rows or self._grammars is None:
            return set()
        words = np.zeros((len(rows), self._grammars.words), np.int32)
        stuck = set()
        for index, row in enumerate(rows):
            matcher = sequences[row].matcher
            if matcher is not None and not matcher.allow(words[index]):
                stuck.add(row)
                words[index] = -1  # draws as usual, and is thrown away
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        known = min(bits.shape[1], logits.shape[1])
        forbidden = np.ones((len(rows), logits.shape[1]), bool)
        forbidden[:, :known] = bits[:, :known] == 0
        logits[rows] = logits[rows].masked_fill(
            torch.from_numpy(forbidden).to(logits.device), -torch.inf
        )
        return stuck

    def _adjust(self, logits: Tensor, sequences: list[SampledSequence]) -> None:
        """Penalties, bias and forbidden end tokens, in place. Costs nothing where none is asked."""
        repeated, counted = _Entries(), _Entries()
        biased, forbidden = _Entries(), _Entries()
        for row, sequence in enumerate(sequences):
            params = sequence.params
            if params.repetition_penalty != 1.0:
                repeated.add(row, sequence.seen, _always(params.repetition_penalty))
            if _counts(params):
                counted.add(row, sequence.generated, _penalty_of(sequence))
            if params.logit_bias:
                biased.add(row, params.logit_bias, params.logit_bias.__getitem__)
            if sequence.position < params.min_tokens:
                end = {*self._eos, *params.stop_token_ids}
                forbidden.add(row, filter(self._knows, end), _always(-torch.inf))
        if repeated:
            index, penalty = repeated.tensors(logits)
            value = logits[index]
            value = torch.where(value > 0, value / penalty, value * penalty)
            logits[index] = value.clamp(max=_LARGEST)
        for entries in (counted, biased, forbidden):
            if entries:
                index, amount = entries.tensors(logits)
                logits[index] = (logits[index] + amount).clamp(max=_LARGEST)


def _always(amount: float) -> Callable[[int], float]:
    return lambda _: amount


def _penalty_of(sequence: SampledSequence) -> Callable[[int], float]:
    params, counts = sequence.params, sequence.generated
    return lambda token: -params.presence_penalty - params.frequency_penalty * counts[token]


class _Entries:
    """(row, token) pairs with an amount each, gathered for one indexed operation."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._tokens: list[int] = []
        self._amounts: list[float] = []

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def add(self, row: int, tokens: Iterable[int], amount: Callable[[int], float]) -> None:
        for token in tokens:
            self._rows.append(row)
            self._tokens.append(token)
            self._amounts.append(amount(token))

    def tensors(self, logits: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """The index (rows, tokens) and the amounts, on the logits' device."""
        device = logits.device
        index = torch.tensor([self._rows, self._tokens], device=device)
        return (index[0], index[1]), torch.tensor(self._amounts, device=device)


def draw_of(sequence: SampledSequence) -> Draw | None:
    """How the sequence's next token is drawn; None: the likeliest is taken."""
    params = sequence.params
    if params.temperature < GREEDY_BELOW:
        return None
    number = uniform(params.seed, sequence.choice, sequence.position)
    return Draw(number, params.temperature, params.top_k, params.top_p, params.min_p)


def _choose(logits: Tensor, sequences: list[SampledSequence]) -> list[int]:
    """The tokens of all rows: the likeliest where the row is greedy, else drawn."""
    asked = [draw_of(sequence) for sequence in sequences]
    random = [row for row, each in enumerate(asked) if each is not None]
    if not random:
        return _likeliest(logits)
    draws = [each for each in asked if each is not None]
    if len(random) == len(sequences):
        return _integers(draw(logits, draws))
    tokens = logits.argmax(dim=-1)
    tokens[random] = draw(logits[random], draws)
    return _integers(tokens)


def _likeliest(logits: Tensor) -> list[int]:
    """The largest entry's index in every row."""
    if logits.device.type == "cpu":
        # a tenth of torch's time for a row, whose threads would be woken for it
        return [int(token) for token in logits.numpy().argmax(axis=1)]
    return _integers(logits.argmax(dim=-1))


def _integers(tokens: Tensor) -> list[int]:
    return [int(token) for token in tokens.tolist()]


def finite_rows(logits: Tensor) -> list[bool]:
    """Whether each row of [R, vocab] holds finite numbers alone."""
    if logits.device.type == "cpu":
        values = logits.numpy()
        ends = np.stack((values.max(axis=1), values.min(axis=1)))  # a NaN becomes both
        return [bool(finite) for finite in np.isfinite(ends).all(axis=0)]
    sums = torch.isfinite(logits.sum(dim=-1))  # a sum with a NaN or an infinity is not finite
    if bool(sums.all()):
        return [True] * logits.shape[0]
    rows: list[bool] = torch.isfinite(logits).all(dim=-1).tolist()  # a sum can also overflow
    return rows


def prompt_logprobs(
    logits: Tensor, next_tokens: Sequence[int | None], k: int
) -> list[TokenLogprobs]:
    """How likely the model held the text's own next token, at every position.

    logits: [n, vocab] fp32; next_tokens: [n], None where the text ends: then the likeliest stands
    in. Each entry has the k most likely.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    likeliest = _integers(logprobs.argmax(dim=-1))
    tokens = [
        best if token is None else token for token, best in zip(next_tokens, likeliest, strict=True)
    ]
    return report(logprobs, tokens, [k] * len(tokens))


def report(logprobs: Tensor, tokens: list[int], widths: list[int]) -> list[TokenLogprobs]:
    """logprobs: [n, vocab]; the entry of each row's token with its widths[i] most likely."""
    if not tokens:
        return []
    chosen = torch.tensor(tokens, device=logprobs.device)[:, None]
    of_token = logprobs.gather(1, chosen)[:, 0].tolist()
    top = logprobs.topk(min(max(widths), logprobs.shape[1]), dim=-1)
    ranked = [
        list(zip(ids, values, strict=True))
        for ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]
    return [
        TokenLogprobs(token, value, row[:width])
        for token, value, row, width in zip(tokens, of_token, ranked, widths, strict=True)
    ]
