"""What became of one request, as its caller saw it."""

from __future__ import annotations  # array is generic for the type checker only

from array import array
from dataclasses import dataclass, field

from app.bench.workloads import NO_BUDGET, Budget


@dataclass(slots=True)
class Outcome:
    """One request. Times are milliseconds since the start of the run."""

    tenant: str
    adapter: str  # "" for the base model
    sent_ms: float
    asked_tokens: int  # prompt and answer, what the tenant wanted to be served
    budget: Budget = NO_BUDGET
    weight: float = 1.0
    first_ms: float | None = None
    last_ms: float | None = None
    tokens: int = 0
    late_tokens: int = 0  # after their due time: first token + k x tpot
    gaps_ms: array[float] = field(default_factory=lambda: array("d"))
    refused: str = ""  # the code of what ended it without a whole answer
    done: bool = False

    def take(self, now_ms: float, count: int = 1) -> None:
        """`count` tokens have arrived together."""
        if count < 1:
            return
        if self.first_ms is None or self.last_ms is None:
            self.first_ms = now_ms
        else:
            self.gaps_ms.append(now_ms - self.last_ms)
        self.last_ms = now_ms
        if self.budget.tpot_ms is not None:
            since_first = now_ms - self.first_ms
            for k in range(self.tokens, self.tokens + count):
                self.late_tokens += since_first > k * self.budget.tpot_ms + 1e-6
        self.tokens += count

    def count(self, tokens: int) -> None:
        """The server's own count, where it differs from what was seen: several came together.

        Then only the last token's due time can be judged.
        """
        if tokens <= self.tokens or self.first_ms is None or self.last_ms is None:
            return
        self.tokens = tokens
        if self.budget.tpot_ms is not None:
            due_ms = self.first_ms + (tokens - 1) * self.budget.tpot_ms
            self.late_tokens = int(self.last_ms > due_ms + 1e-6)

    @property
    def answered(self) -> bool:
        return self.done and not self.refused

    @property
    def ttft_ms(self) -> float | None:
        return None if self.first_ms is None else self.first_ms - self.sent_ms

    @property
    def tpot_ms(self) -> float | None:
        """Mean time per output token after the first; None for fewer than two."""
        if self.first_ms is None or self.last_ms is None or self.tokens < 2:
            return None
        return (self.last_ms - self.first_ms) / (self.tokens - 1)

    @property
    def good(self) -> bool:
        """Answered whole and inside its budget; without a budget, answered."""
        return self.good_at_end and self.late_tokens == 0

    @property
    def good_at_end(self) -> bool:
        """The same by the first and the last token alone: a late one between may be made up for."""
        ttft_ms, tpot_ms = self.ttft_ms, self.tpot_ms or 0.0
        return (
            self.answered
            and (self.budget.ttft_ms is None or (ttft_ms or 0.0) <= self.budget.ttft_ms + 1e-6)
            and (self.budget.tpot_ms is None or tpot_ms <= self.budget.tpot_ms + 1e-6)
        )
