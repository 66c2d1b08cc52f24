"""What the operator API takes and answers for keys."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from app.caller import KeyLimits
from app.keys import service
from app.keys.models import ApiKey
from app.keys.token import PREFIX

Count = Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)]
AdapterName = Annotated[str, Field(min_length=1, max_length=63)]


class KeyIn(BaseModel):
    """A tenant's key; with `operator: true` and no tenant, an operator's."""

    model_config = ConfigDict(extra="forbid")

    tenant_id: str | None = Field(default=None, max_length=40)
    operator: Annotated[bool, Field(strict=True)] = False
    name: str = Field(default="", max_length=100)
    adapters: list[AdapterName] | None = None
    expires_at: AwareDatetime | None = None
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    max_concurrent: Count | None = None
    monthly_tokens: Annotated[int, Field(ge=1, le=2**53, strict=True)] | None = None

    def limits(self) -> KeyLimits:
        return KeyLimits(
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            max_concurrent=self.max_concurrent,
            monthly_tokens=self.monthly_tokens,
        )


class RotateIn(BaseModel):
    model_config = ConfigDict(extra="forbid")

    overlap_s: Annotated[int, Field(ge=0, le=90 * 86_400, strict=True)] | None = None
    """How long the old key still works; without it the platform's setting."""


class KeyOut(BaseModel):
    """A key as lists show it: never its secret, always what tells it from the others."""

    id: str
    object: Literal["api_key"] = "api_key"
    tenant_id: str | None
    role: Literal["api_key", "operator"]
    name: str
    prefix: str
    last4: str
    state: Literal["active", "expired", "revoked"]
    adapters: list[str] | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    max_concurrent: int | None
    monthly_tokens: int | None
    created_by: str
    created_at: datetime
    expires_at: datetime | None
    revoke_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None

    @classmethod
    def of(cls, key: ApiKey, now: datetime) -> "KeyOut":
        computed = {"object", "prefix", "state", "adapters"}
        return cls(
            **{name: getattr(key, name) for name in cls.model_fields.keys() - computed},
            prefix=f"{PREFIX}_{key.public_id}",
            state=service.state(key, now),
            adapters=key.scopes.get("adapters"),
        )


class NewKeyOut(BaseModel):
    """A new key with its text, which is shown this once."""

    id: str
    object: Literal["api_key"] = "api_key"
    key: str
    api_key: KeyOut
