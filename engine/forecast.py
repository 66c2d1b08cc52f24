"""When a request that arrives now would have its first token: a prediction from plain figures.

Two things can be short. Without a free place, one has to be left for every request that comes
before: answers of the usual length, decoded in a full batch. And prompts are computed at the rate
that the step-time model gives for chunks beside the decodes that run. The adapter's way to the
device goes on meanwhile.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

from engine.arrivals import NONE, Overtaking
from engine.backlog import Work
from engine.step_time import StepShape, StepTimes

FIRST_GUESS_TOKENS = 64.0
SURPRISES = 0.7
"""Of the quantile of later arrivals at the percentile: most requests are admitted far within their
budget, so that the few at its edge may be late more often than the percentile says."""
MOST_ANSWERS = 4096
"""Answers after which the older half counts half."""


class AnswerLength:
    """Tokens of a usual answer: all tokens drawn, of unfinished answers too, by answers that ended.

    The mean of those that ended would forget that short ones end first.
    """

    def __init__(self) -> None:
        self._answers = 1.0
        self._tokens = FIRST_GUESS_TOKENS

    def observe(self, tokens: int) -> None:
        """An answer ended."""
        self._answers += 1.0
        self._tokens += tokens
        if self._answers > MOST_ANSWERS:
            self._answers *= 0.5
            self._tokens *= 0.5

    def expected(self, running_tokens: int) -> float:
        """`running_tokens`: drawn so far by the answers that have not ended."""
        return (self._tokens + running_tokens) / self._answers


@dataclass(frozen=True, slots=True)
class Standing:
    """The engine as a newcomer finds it."""

    ahead: Work  # waiting, and served before it
    prefilling_tokens: int  # of running sequences, still to be computed
    own_tokens: int
    free_places: int
    decodes: StepShape  # a step of everything that runs, without prompts
    chunk: int  # prompt tokens that a step takes beside them
    answer_tokens: float
    adapter_ms: float  # until its adapter is usable
    own_turn_ms: float = 0.0  # until its tenant's backlog is worked off as fast as it is now
    overtaking: Overtaking = NONE  # what arrives later and is served earlier
    percentile: float = 0.5  # of such requests, how many the prediction is to hold for


def first_token_ms(standing: Standing, times: StepTimes) -> float:
    """Milliseconds from now; 0 while the model knows nothing."""
    if not times.known:
        return 0.0
    waited_for = max(0.0, standing.ahead.requests + 1.0 - standing.free_places)
    tokens = standing.ahead.tokens + standing.prefilling_tokens
    place_ms = waited_for * _place_ms(standing, times) if waited_for else 0.0
    work_ms = place_ms + tokens * _prompt_token_ms(standing, times)
    own_steps = math.ceil(standing.own_tokens / max(1, standing.chunk))
    count = math.ceil(standing.own_tokens / own_steps)
    middle = standing.own_tokens // 2  # a chunk of the prompt's middle attends to half of it
    own_ms = own_steps * times.mean_ms(standing.decodes.with_chunk(middle, count))
    alone_ms = max(standing.adapter_ms, standing.own_turn_ms, work_ms) + own_ms
    overtaken_ms = with_overtaking_ms(work_ms + own_ms, standing)
    # it arrives in the middle of a step
    return max(alone_ms, overtaken_ms) + 0.5 * times.mean_ms(standing.decodes)


def with_overtaking_ms(work_ms: float, standing: Standing) -> float:
    """How long so much work takes while other work that is served first goes on arriving.

    In W ms there arrives (1 - share) W of it, and more by the root of W times its variance times
    `SURPRISES` of the percentile's normal quantile: W is when all that is done.
    """
    others = standing.overtaking
    if others.share >= 1.0:
        return work_ms
    quantile = SURPRISES * NormalDist().inv_cdf(standing.percentile)
    surprise = quantile * math.sqrt(others.variance_ms)
    root = math.sqrt(surprise * surprise + 4.0 * others.share * work_ms)
    return ((surprise + root) / (2.0 * others.share)) ** 2


def _place_ms(standing: Standing, times: StepTimes) -> float:
    """How often a place becomes free: each running answer takes its share of every step."""
    rows = max(1, standing.decodes.decode_rows)
    return standing.answer_tokens * times.mean_ms(standing.decodes) / rows


def _prompt_token_ms(standing: Standing, times: StepTimes) -> float:
    """A prompt token's share of a step with a full chunk.

    While places are waited for, the decodes' part of the steps is in the waits already.
    """
    chunk = max(1, standing.chunk)
    step_ms = times.mean_ms(standing.decodes.with_chunk(0, chunk))
    if standing.ahead.requests + 1.0 > standing.free_places:
        step_ms -= times.mean_ms(standing.decodes)
    return max(0.0, step_ms) / chunk
