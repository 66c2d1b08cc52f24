"""What /v1/usage takes and answers."""

from datetime import datetime
from typing import Literal

from pydantic import BaseModel

Bucket = Literal["day", "hour"]


class UsageBucket(BaseModel):
    """Closed requests that began in one bucket. `group` is the id or name that was grouped by."""

    start: datetime
    group: str | None
    requests: int
    cancelled: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    total_tokens: int


class UsageReport(BaseModel):
    """Sums of the ledger over [start, end)."""

    object: str = "usage"
    start: datetime
    end: datetime
    bucket: Bucket
    group_by: Literal["key", "adapter", "model"] | None
    data: list[UsageBucket]
