"""What /v1/limits answers."""

from datetime import datetime

from pydantic import BaseModel


class WindowObject(BaseModel):
    """One limit per minute, of the tenant or of this key."""

    scope: str  # tenant | key
    name: str  # requests | tokens
    limit: int
    used: int
    remaining: int
    reset_ms: int


class ConcurrencyObject(BaseModel):
    """Requests that run at once, of the tenant or of this key."""

    scope: str
    limit: int
    used: int


class MonthObject(BaseModel):
    """Tokens of this calendar month in UTC; `limit` null means none."""

    scope: str
    limit: int | None
    used: int
    reserved: int
    resets_at: datetime


class LimitsObject(BaseModel):
    """Limits of the caller, and where it stands. Null means no limit."""

    object: str = "limits"
    per_minute: list[WindowObject]
    max_concurrent: int | None
    concurrent: int  # the tenant's
    concurrency: list[ConcurrencyObject]
    monthly_tokens: list[MonthObject]
    max_tokens: int | None
    max_adapters: int | None
    max_stored_bytes: int | None
    max_resident_bytes: int | None
    reserved_resident_bytes: int
    max_rank: int
    ttft_ms: float | None
    tpot_ms: float | None
    budget_percentile: float
    weight: float
