"""What the tenant API and the operator API take and answer for requests for other limits."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from app.limit_requests.models import LimitRequest, RequestState
from app.limit_requests.service import MOST_TEXT, LimitName, value_of

Text = Annotated[str, Field(max_length=MOST_TEXT, pattern=r"^[^\x00]*$")]
Value = Annotated[float, Field(ge=0, le=2**53, strict=True, allow_inf_nan=False)]


class LimitRequestIn(BaseModel):
    """Another limit for the caller's tenant, and why. Nothing changes before it is approved."""

    model_config = ConfigDict(extra="forbid")

    limit: LimitName
    wanted: Value
    """A whole number, but for the latency budget's milliseconds."""
    reason: Text = ""


class ApproveIn(BaseModel):
    model_config = ConfigDict(extra="forbid")

    value: Value | None = None
    """What the limit becomes; without it, what was asked for."""
    answer: Text = ""


class DeclineIn(BaseModel):
    model_config = ConfigDict(extra="forbid")

    answer: Annotated[Text, Field(min_length=1)]
    """Why; the tenant reads it."""


class LimitRequestOut(BaseModel):
    """As its tenant sees it. `granted`: what the limit was set to when it was approved."""

    id: str
    object: Literal["limit_request"] = "limit_request"
    limit: str
    current: int | float | None
    """The limit when it was asked; null: none."""
    wanted: int | float
    granted: int | float | None
    reason: str
    state: RequestState
    answer: str
    asked_by: str
    created_at: datetime
    decided_at: datetime | None

    @classmethod
    def of(cls, row: LimitRequest) -> "LimitRequestOut":
        return cls.model_validate(_fields(row))


class OperatorLimitRequestOut(LimitRequestOut):
    """With whose it is and who answered."""

    tenant_id: str
    decided_by: str | None

    @classmethod
    def of(cls, row: LimitRequest) -> "OperatorLimitRequestOut":
        more = {"tenant_id": row.tenant_id, "decided_by": row.decided_label}
        return cls.model_validate(_fields(row) | more)


def _fields(row: LimitRequest) -> dict[str, object]:
    def number(value: float | None) -> float | int | None:
        return None if value is None else value_of(row.limit_name, value)

    return {
        "id": row.id,
        "limit": row.limit_name,
        "current": number(row.current),
        "wanted": number(row.wanted),
        "granted": number(row.granted),
        "reason": row.reason,
        "state": row.state,
        "answer": row.answer,
        "asked_by": row.asked_label,
        "created_at": row.created_at,
        "decided_at": row.decided_at,
    }
