"""The JSON of the adapters API. Times are Unix seconds, sizes are bytes."""

from typing import Any, Literal

from pydantic import BaseModel

from app.adapters.alias_schemas import AliasObject


class FindingObject(BaseModel):
    code: str
    severity: Literal["info", "warn", "fail"]
    message: str
    field: str | None = None
    figures: dict[str, Any] = {}


class CheckObject(BaseModel):
    group: str
    status: Literal["pass", "warn", "fail", "skipped"]
    findings: list[FindingObject]
    figures: dict[str, Any]
    duration_ms: int


class ReportObject(BaseModel):
    """The newest validation run. `message` says why its last attempt gave no verdict."""

    state: str
    attempts: int
    message: str | None
    checks: list[CheckObject]


class VersionObject(BaseModel):
    object: Literal["adapter.version"] = "adapter.version"
    id: str
    adapter_id: str
    adapter: str
    version: int
    state: str
    code: str | None
    reason: str | None
    digest: str
    config_bytes: int
    weights_bytes: int
    rank: int | None
    targets: list[str] | None
    base_digest: str | None
    created_at: int
    ready_at: int | None
    report: ReportObject | None = None


class AdapterObject(BaseModel):
    object: Literal["adapter"] = "adapter"
    id: str
    name: str
    created_at: int
    versions: list[VersionObject]
    aliases: list[AliasObject]


class AdapterList(BaseModel):
    """A page: ask again with `after` = `last_id` while `has_more`."""

    object: Literal["list"] = "list"
    data: list[AdapterObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class OperatorAdapterObject(AdapterObject):
    tenant_id: str


class OperatorAdapterList(BaseModel):
    object: Literal["list"] = "list"
    data: list[OperatorAdapterObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class EngineAcknowledgement(BaseModel):
    """What one engine holds of an erased version. `pending`: not heard from yet."""

    engine: str
    device: Literal["erased", "pending"]
    host: Literal["erased", "pending"]
    prefix_cache: Literal["erased", "pending"]


class ErasedItem(BaseModel):
    version_id: str
    version: int
    digest: str
    disk: Literal["erased", "pending", "kept"]
    kept_for: list[str]  # ids of the tenant's other versions with the same content
    engines: list[EngineAcknowledgement]


class ErasureReceipt(BaseModel):
    object: Literal["adapter.erasure"] = "adapter.erasure"
    id: str
    adapter_id: str
    complete: bool
    items: list[ErasedItem]
    backups: str
    created_at: int
