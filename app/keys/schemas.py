"""What the tenant API and the operator API take and answer for keys."""

from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field

from app.caller import KeyAccess, KeyBudget, KeyLimits
from app.keys import service
from app.keys.leaks import MAX_TEXT, Candidate, Owner
from app.keys.models import ApiKey
from app.keys.restrictions import access_of
from app.keys.service import KeyState
from app.keys.token import PREFIX

Count = Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)]
Milliseconds = Annotated[float, Field(gt=0, le=3_600_000, allow_inf_nan=False)]


def _in_utc(at: datetime) -> datetime:
    try:
        return at.astimezone(UTC)
    except OverflowError:
        raise ValueError(
            "it lies outside the years 1 to 9999 in UTC; send null for a key that never expires"
        ) from None


Expiry = Annotated[AwareDatetime, AfterValidator(_in_utc)]
AdapterName = Annotated[str, Field(min_length=1, max_length=63)]


class KeyChange(BaseModel):
    """Only what is sent changes; null ends a restriction."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(default="", max_length=100)
    adapters: list[AdapterName] | None = None
    access: KeyAccess = "full"
    """`read` may look at everything, `inference` may only call models, `manage` may also change
    the tenant's keys and users."""
    networks: list[Annotated[str, Field(max_length=64)]] | None = None
    """CIDRs that the key may be used from; without it, everywhere."""
    expires_at: Expiry | None = None
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    max_concurrent: Count | None = None
    monthly_tokens: Annotated[int, Field(ge=1, le=2**53, strict=True)] | None = None
    ttft_ms: Milliseconds | None = None
    """A key's latency budget may only be looser than its tenant's."""
    tpot_ms: Milliseconds | None = None
    budget_percentile: Annotated[float, Field(ge=0.5, le=0.999, allow_inf_nan=False)] | None = None

    def budget(self) -> KeyBudget:
        return KeyBudget(self.ttft_ms, self.tpot_ms, self.budget_percentile)

    def limits(self) -> KeyLimits:
        return KeyLimits(
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            max_concurrent=self.max_concurrent,
            monthly_tokens=self.monthly_tokens,
        )


class KeyIn(KeyChange):
    """A tenant's key; with `operator: true` and no tenant, an operator's."""

    tenant_id: str | None = Field(default=None, max_length=40)
    operator: Annotated[bool, Field(strict=True)] = False


class OwnKeyIn(KeyChange):
    """A key of the caller's own tenant; what is left out is as tight as the key that asks."""


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
    access: KeyAccess
    networks: list[str] | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    max_concurrent: int | None
    monthly_tokens: int | None
    ttft_ms: float | None
    tpot_ms: float | None
    budget_percentile: float | None
    created_by: str
    created_at: datetime
    expires_at: datetime | None
    revoke_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None

    @classmethod
    def of(cls, key: ApiKey, now: datetime) -> "KeyOut":
        computed = {"object", "prefix", "state", "adapters", "access", "networks"}
        return cls(
            **{name: getattr(key, name) for name in cls.model_fields.keys() - computed},
            prefix=f"{PREFIX}_{key.public_id}",
            state=service.state(key, now),
            adapters=key.scopes.get("adapters"),
            access=access_of(key.scopes),
            networks=key.scopes.get("networks"),
        )


class NewKeyOut(BaseModel):
    """A new key with its text, which is shown this once."""

    id: str
    object: Literal["api_key"] = "api_key"
    key: str
    api_key: KeyOut


class CheckIn(BaseModel):
    """A text that may hold keys: one key, or a file that somebody published."""

    model_config = ConfigDict(extra="forbid")

    text: str = Field(min_length=1, max_length=MAX_TEXT)


class CheckedKey(BaseModel):
    """What is known of a text of our shape; `shown` never has the secret."""

    shown: str
    checksum: bool
    """False: mistyped or invented; the rest is then unknown."""
    known: bool
    live: bool
    """It works now: revoke it."""
    key_id: str | None = None
    name: str | None = None
    tenant_id: str | None = None
    tenant: str | None = None
    role: Literal["api_key", "operator"] | None = None
    state: KeyState | None = None
    last_used_at: datetime | None = None

    @classmethod
    def of(cls, candidate: Candidate, owner: Owner | None) -> "CheckedKey":
        checked = cls(
            shown=candidate.shown,
            checksum=candidate.key is not None,
            known=owner is not None,
            live=owner is not None and owner.live,
        )
        if owner is not None:
            checked.key_id = owner.row.id
            checked.name = owner.row.name
            checked.tenant_id = owner.row.tenant_id
            checked.tenant = None if owner.tenant is None else owner.tenant.name
            checked.role = "operator" if owner.row.role == "operator" else "api_key"
            checked.state = owner.state
            checked.last_used_at = owner.row.last_used_at
        return checked


class CheckOut(BaseModel):
    """`data` is empty when nothing in the text has the shape of a key."""

    object: Literal["list"] = "list"
    data: list[CheckedKey]
