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
        if not self.answered:
            return False
        limit_ms, ttft_ms = self.budget.ttft_ms, self.ttft_ms
        if limit_ms is not None and (ttft_ms is None or ttft_ms > limit_ms + 1e-6):
            return False
        return self.late_tokens == 0
