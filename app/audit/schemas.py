"""What the operator API answers for audit events."""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel

from app.audit.models import AuditEvent


class AuditEventOut(BaseModel):
    id: str
    object: Literal["audit_event"] = "audit_event"
    at: datetime
    actor_kind: str
    actor_id: str
    actor_label: str
    tenant_id: str | None
    action: str
    target: str
    detail: dict[str, Any]
    request_id: str | None

    @classmethod
    def of(cls, event: AuditEvent) -> "AuditEventOut":
        names = cls.model_fields.keys() - {"object"}
        return cls(**{name: getattr(event, name) for name in names})
