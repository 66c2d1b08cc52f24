"""What is written when a request is admitted and when it ends, as plain values."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

Status = Literal["completed", "cancelled", "failed"]


@dataclass(frozen=True, slots=True)
class OpenEntry:
    """One admitted request, before the engine sees it. `monthly` maps owner id -> limit or None."""

    request_id: str
    tenant_id: str
    key_id: str | None
    user_id: str | None
    adapter_id: str | None
    version_id: str | None
    model: str
    endpoint: str
    streamed: bool
    engine: str
    reserved_tokens: int
    monthly: dict[str, int | None] = field(default_factory=dict)
    alias: str | None = None  # that led to the version


@dataclass(frozen=True, slots=True)
class FinalEntry:
    """How a request ended. Written once; the spool keeps it while the database is away."""

    request_id: str
    engine: str
    status: Status
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    overshoot_tokens: int
    finish_reasons: list[str]
    closed_at: datetime
    error_code: str | None = None
    queue_ms: float | None = None
    adapter_wait_ms: float | None = None
    ttft_ms: float | None = None
    total_ms: float | None = None
    prefill_us: int = 0  # engine time; zero where the engine did not live to say
    decode_us: int = 0
    adapter_byte_s: int = 0

    @property
    def billed_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


def microseconds(ms: float) -> int:
    """Engine time as the ledger keeps it: whole numbers add up the same in any order."""
    return round(ms * 1000.0)


def month_of(at: datetime) -> str:
    """The calendar month in UTC that a request which began `at` is counted in: "2026-11"."""
    return f"{at.year:04d}-{at.month:02d}"


def hour_of(at: datetime) -> int:
    """Hours since the Unix epoch."""
    return int(at.timestamp() // 3600)
