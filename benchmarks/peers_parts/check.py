"""Whether a peer really answers with the adapters: its tokens beside PEFT's on the same prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

LEAST_AGREEMENT = 0.5
"""Peers round differently, and what follows a first other token is another text."""

Tokens = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Verdict:
    """Shares of tokens up to the first that differs, averaged over all prompts."""

    adapters: float  # the peer's answers with adapters beside PEFT's with the same adapters
    base: float  # the peer's answers of the base model beside PEFT's of it
    inert: float  # the peer's answers with adapters beside its own of the base model
    reason: str = ""  # why it is not counted; empty: it is

    @property
    def counted(self) -> bool:
        return not self.reason


def agreement(answers: Tokens, reference: Tokens) -> float:
    """1.0: the same tokens; 0.0: no first token is the same."""
    shares = []
    for mine, theirs in zip(answers, reference, strict=True):
        pairs = zip(mine, theirs, strict=True)
        same = next((at for at, (a, b) in enumerate(pairs) if a != b), len(mine))
        shares.append(same / len(mine))
    return sum(shares) / len(shares)


def judge(
    with_adapters: Tokens, without: Tokens, peft_adapters: Tokens, peft_base: Tokens
) -> Verdict:
    """The answers of a peer and of PEFT to the same two jobs."""
    verdict = Verdict(
        adapters=agreement(with_adapters, peft_adapters),
        base=agreement(without, peft_base),
        inert=agreement(with_adapters, without),
    )
    unchanged = [
        number
        for number, (mine, base) in enumerate(zip(with_adapters, without, strict=True))
        if list(mine) == list(base)
    ]
    expected = agreement(peft_adapters, peft_base)
    if verdict.inert > (1 + expected) / 2:
        reason = f"its adapters change too little: {len(unchanged)} answers are the base model's"
    elif verdict.adapters < LEAST_AGREEMENT:
        reason = f"only {verdict.adapters:.0%} of its tokens with adapters are PEFT's"
    elif verdict.base < LEAST_AGREEMENT:
        reason = f"only {verdict.base:.0%} of its tokens of the base model are transformers'"
    else:
        return verdict
    return Verdict(verdict.adapters, verdict.base, verdict.inert, reason)
