"""The JSON of webhooks. Times are Unix seconds."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from app.webhooks.models import WebhookDelivery, WebhookEndpoint
from app.webhooks.outbox import EventType
from app.webhooks.sender import MAX_URL_CHARACTERS, Code

Url = Annotated[str, Field(min_length=1, max_length=MAX_URL_CHARACTERS)]
Events = Annotated[list[EventType], Field(min_length=1, max_length=20)]
Description = Annotated[str, Field(max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""One line; PostgreSQL has no text with a NUL."""
DeliveryState = Literal["pending", "delivered", "dead"]


class WebhookIn(BaseModel):
    """Where to tell of what. Only https, and only public addresses."""

    model_config = ConfigDict(extra="forbid")

    url: Url
    events: Events
    description: Description = ""


class WebhookChange(BaseModel):
    """Only what is sent changes. `enabled: true` also ends a disabling by the system."""

    model_config = ConfigDict(extra="forbid")

    url: Url | None = None
    events: Events | None = None
    description: Description | None = None
    enabled: Annotated[bool, Field(strict=True)] | None = None

    @field_validator("url", "events", "description", "enabled", mode="before")
    @classmethod
    def _not_null(cls, value: object) -> object:
        if value is None:
            raise ValueError("must not be null; leave it out to keep it")
        return value


class RotateSecretIn(BaseModel):
    model_config = ConfigDict(extra="forbid")

    overlap_s: Annotated[int, Field(ge=0, le=30 * 86_400, strict=True)] = 86_400
    """How long messages are also signed with the secret before; 0 where it has leaked."""


class WebhookObject(BaseModel):
    """Never its secret. `failing_since`: nothing was taken since then."""

    object: Literal["webhook"] = "webhook"
    id: str
    url: str
    events: list[str]
    description: str
    enabled: bool
    disabled_reason: str | None
    failing_since: int | None
    last_success_at: int | None
    previous_secret_until: int | None
    created_at: int
    updated_at: int


class WebhookWithSecret(BaseModel):
    """The only answer that holds the secret."""

    id: str
    secret: str
    webhook: WebhookObject


class OperatorWebhookObject(WebhookObject):
    tenant_id: str


class WebhookList(BaseModel):
    object: Literal["list"] = "list"
    data: list[WebhookObject]


class OperatorWebhookList(BaseModel):
    """A page, newest first: ask again with `after` = `last_id` while `has_more`."""

    object: Literal["list"] = "list"
    data: list[OperatorWebhookObject]
    last_id: str | None
    has_more: bool


class DeletedWebhook(BaseModel):
    object: Literal["webhook.deleted"] = "webhook.deleted"
    id: str
    deleted: Literal[True] = True


class AttemptObject(BaseModel):
    """`status` is null where nothing was answered. What was answered is not kept."""

    attempt: int
    at: int
    code: Code
    status: int | None
    duration_ms: int


class DeliveryObject(BaseModel):
    """`event_id` is the message's `webhook-id`."""

    object: Literal["webhook.delivery"] = "webhook.delivery"
    id: str
    webhook_id: str
    event_id: str
    type: str
    state: DeliveryState
    code: Code | None
    attempts: list[AttemptObject]
    next_attempt_at: int | None
    created_at: int
    finished_at: int | None


class DeliveryList(BaseModel):
    """A page, newest first: ask again with `after` = `last_id` while `has_more`."""

    object: Literal["list"] = "list"
    data: list[DeliveryObject]
    last_id: str | None
    has_more: bool


def webhook_object(row: WebhookEndpoint) -> WebhookObject:
    return WebhookObject(**_webhook_fields(row))


def operator_object(row: WebhookEndpoint) -> OperatorWebhookObject:
    return OperatorWebhookObject(tenant_id=row.tenant_id, **_webhook_fields(row))


def _webhook_fields(row: WebhookEndpoint) -> dict[str, Any]:
    times = {
        "failing_since": row.failing_since,
        "last_success_at": row.last_success_at,
        "previous_secret_until": row.previous_until,
        "created_at": row.created_at,
        "updated_at": row.updated_at,
    }
    return {
        "id": row.id,
        "url": row.url,
        "events": row.events,
        "description": row.description,
        "enabled": row.status == "enabled",
        "disabled_reason": row.disabled_reason,
        **{name: None if at is None else int(at.timestamp()) for name, at in times.items()},
    }


def delivery_object(row: WebhookDelivery) -> DeliveryObject:
    pending = row.state == "pending"
    return DeliveryObject.model_validate(
        {
            "id": row.id,
            "webhook_id": row.endpoint_id,
            "event_id": row.event_id,
            "type": row.type,
            "state": row.state,
            "code": row.code,
            "attempts": row.attempt_log,
            "next_attempt_at": int(row.next_attempt_at.timestamp()) if pending else None,
            "created_at": int(row.created_at.timestamp()),
            "finished_at": None if row.finished_at is None else int(row.finished_at.timestamp()),
        }
    )


def delivery_list(rows: list[DeliveryObject], limit: int) -> DeliveryList:
    """`rows` may hold one more than `limit`, which tells of a next page."""
    shown = rows[:limit]
    return DeliveryList(
        data=shown, last_id=shown[-1].id if shown else None, has_more=len(rows) > limit
    )
