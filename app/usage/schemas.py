"""What /v1/usage and /admin/v1/usage answer."""

from datetime import datetime

from pydantic import BaseModel

from app.usage.spans import Bucket


class UsageBucket(BaseModel):
    """Closed requests that began in one bucket.

    Of the ids and the model those are set that the report is grouped by; null is none (a call of
    the console's playground has no key, one of the base model no adapter). `group` is the value
    itself where there is one grouping.
    """

    start: datetime
    group: str | None
    tenant_id: str | None = None
    key_id: str | None = None
    adapter_id: str | None = None
    model: str | None = None
    requests: int
    cancelled: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    total_tokens: int
    overshoot_tokens: int
    prefill_ms: float
    decode_ms: float
    adapter_byte_seconds: int


class UsageReport(BaseModel):
    """Sums of the ledger over [start, end). `next` is the cursor (`after`) of the next page."""

    object: str = "usage"
    start: datetime
    end: datetime
    bucket: Bucket
    group_by: list[str]
    data: list[UsageBucket]
    has_more: bool
    next: str | None
