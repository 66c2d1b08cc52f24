"""The reference workload: which request uses which adapter, and what is asked of every peer."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

RANKS = (8,) * 8 + (16,) * 4 + (32,) * 2 + (64,) * 2
"""Of the adapters, by number; each is on all seven linears of every layer."""
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 128, 64
CHECK_TOKENS = 16


@dataclass(frozen=True)
class Job:
    """Requests that start at once. Greedy, every answer `output_tokens` long, end token or not."""

    prompts: list[list[int]]
    adapters: list[int | None]  # number of the adapter of each prompt; None: the base model
    output_tokens: int

    @property
    def tokens(self) -> int:
        """Output tokens, together."""
        return len(self.prompts) * self.output_tokens


@dataclass(frozen=True)
class Scenario:
    """One row of figures for every peer."""

    name: str
    title: str
    requests: int
    ranks: tuple[int, ...] = ()  # of the adapters that the requests take in turn; none: the base

    @property
    def alone(self) -> bool:
        """One request at a time, measured by token; else a burst, measured by throughput."""
        return self.requests == 1

    def job(self, rng: random.Random, vocabulary: int, output_tokens: int = OUTPUT_TOKENS) -> Job:
        """Fresh random prompts, so that no cache of a prefix helps."""
        prompts = [
            [rng.randrange(100, vocabulary) for _ in range(PROMPT_TOKENS)]
            for _ in range(self.requests)
        ]
        return Job(prompts, adapters_of(self.requests, len(self.ranks)), output_tokens)


SCENARIOS = (
    Scenario("burst-adapters", f"{REQUESTS} at once, {len(RANKS)} adapters", REQUESTS, RANKS),
    Scenario("burst-base", f"{REQUESTS} at once, base model", REQUESTS),
    Scenario("alone-adapter", f"one request, adapter of rank {RANKS[0]}", 1, RANKS[:1]),
    Scenario("alone-base", "one request, base model", 1),
)


def adapters_of(requests: int, adapters: int) -> list[int | None]:
    """Request i uses adapter i mod `adapters`; without adapters the base model."""
    return [index % adapters if adapters else None for index in range(requests)]


def check_jobs(text: Sequence[int]) -> tuple[Job, Job]:
    """The same prompts with the adapters and without, cut from a text's tokens.

    On a text a model is sure of most of its tokens, so that implementations that only round
    differently agree in them. Raises ValueError for a text that is too short.
    """
    stride = (len(text) - PROMPT_TOKENS) // REQUESTS
    if stride < 1:
        raise ValueError(f"{len(text)} tokens of text are too few for {REQUESTS} prompts")
    prompts = [list(text[at * stride : at * stride + PROMPT_TOKENS]) for at in range(REQUESTS)]
    with_adapters, without = adapters_of(REQUESTS, len(RANKS)), adapters_of(REQUESTS, 0)
    return Job(prompts, with_adapters, CHECK_TOKENS), Job(prompts, without, CHECK_TOKENS)
