"""What the operator API takes and answers for tenants."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from app.tenants.models import Tenant, TenantState

INT32 = 2**31 - 1
Count = Annotated[int, Field(ge=1, le=INT32, strict=True)]
Large = Annotated[int, Field(ge=1, le=2**53, strict=True)]
Milliseconds = Annotated[float, Field(gt=0, le=3_600_000, allow_inf_nan=False)]


class TenantLimitsIn(BaseModel):
    """Limits to set; null returns one to the platform's default."""

    model_config = ConfigDict(extra="forbid")

    weight: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] | None = None
    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    budget_percentile: Annotated[float, Field(ge=0.5, le=0.999, allow_inf_nan=False)] | None = None
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    max_concurrent: Count | None = None
    monthly_tokens: Large | None = None
    max_adapters: Annotated[int, Field(ge=0, le=INT32, strict=True)] | None = None
    max_stored_bytes: Annotated[int, Field(ge=0, le=2**53, strict=True)] | None = None
    max_resident_bytes: Large | None = None
    """Of its adapters in an engine's device memory, and the same in host memory."""
    reserved_resident_bytes: Annotated[int, Field(ge=0, le=2**53, strict=True)] | None = None
    """Of these, what other tenants' adapters cannot push out."""
    max_rank: Count | None = None
    max_tokens: Count | None = None


class TenantIn(TenantLimitsIn):
    name: str = Field(max_length=63)

    def limits(self) -> dict[str, Any]:
        return self.model_dump(exclude={"name"}, exclude_none=True)


class TenantOut(BaseModel):
    id: str
    object: Literal["tenant"] = "tenant"
    name: str
    status: TenantState
    weight: float
    ttft_ms: float | None
    tpot_ms: float | None
    budget_percentile: float | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    max_concurrent: int | None
    monthly_tokens: int | None
    max_adapters: int | None
    max_stored_bytes: int | None
    max_resident_bytes: int | None
    reserved_resident_bytes: int | None
    max_rank: int | None
    max_tokens: int | None
    created_at: datetime
    updated_at: datetime
    deleted_at: datetime | None
    erased_at: datetime | None
    last_used_at: datetime | None
    """When any of its keys was last used, at most a minute behind."""

    @classmethod
    def of(cls, tenant: Tenant, used: Mapping[str, datetime]) -> "TenantOut":
        """`used`: tenant's id -> when it was last used. Without the salt, which is nobody's
        business."""
        names = cls.model_fields.keys() - {"object", "status", "last_used_at"}
        return cls(
            **{name: getattr(tenant, name) for name in names},
            status=tenant.state,
            last_used_at=used.get(tenant.id),
        )


class KeptItem(BaseModel):
    """What a deletion leaves in place, and why."""

    what: str
    why: str


class DeletedAdapters(BaseModel):
    """`left`: not begun; `pending`: gone from rows and files, an engine has yet to say so."""

    left: int
    erased: int
    pending: int


class TenantReceipt(BaseModel):
    """What is gone of a tenant. While `complete` is false, it is being carried on by itself."""

    id: str
    object: Literal["tenant.deletion"] = "tenant.deletion"
    tenant_id: str
    tenant_name: str
    complete: bool
    keys_revoked: int
    users_removed: int
    sessions_ended: int
    uploads_dropped: int
    calls_running: int
    adapters: DeletedAdapters
    kept: list[KeptItem]
    created_by: str
    created_at: datetime
    completed_at: datetime | None
