"""The JSON of the adapters API. Times are Unix seconds, sizes are bytes."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

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
    last_used_at: int | None
    """When a call last used it; at most a minute behind."""
    report: ReportObject | None = None


class UploadIn(BaseModel):
    """What an upload in parts will hold."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(max_length=200)
    config_bytes: int = Field(ge=1, le=2**53, description="size of adapter_config.json")
    weights_bytes: int = Field(ge=1, le=2**53, description="size of adapter_model.safetensors")
    weights_sha256: str | None = Field(
        default=None,
        pattern="^[0-9a-f]{64}$",
        description="of the whole adapter_model.safetensors; checked when it is complete",
    )


class PartObject(BaseModel):
    object: Literal["upload.part"] = "upload.part"
    number: int
    bytes: int
    sha256: str


class UploadVersion(BaseModel):
    """The version that a complete upload has become."""

    id: str
    adapter: str
    version: int


class UploadObject(BaseModel):
    """Part 0 is adapter_config.json; the weights are parts 1 to `parts`, of `part_bytes` each but
    for the last one."""

    object: Literal["upload"] = "upload"
    id: str
    name: str
    state: Literal["open", "completed"]
    config_bytes: int
    weights_bytes: int
    part_bytes: int
    parts: int
    received: list[PartObject]
    missing: list[int]
    version: UploadVersion | None
    created_at: int
    expires_at: int


class UploadList(BaseModel):
    """All uploads that wait for parts; there are few."""

    object: Literal["list"] = "list"
    data: list[UploadObject]


class UploadGone(BaseModel):
    object: Literal["upload.deleted"] = "upload.deleted"
    id: str
    deleted: Literal[True] = True


class AdapterObject(BaseModel):
    object: Literal["adapter"] = "adapter"
    id: str
    name: str
    created_at: int
    last_used_at: int | None
    """When a call last used any version of it; at most a minute behind."""
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


class ValidationObject(BaseModel):
    """A validation run. `message` says why its last attempt gave no verdict."""

    object: Literal["validation"] = "validation"
    id: str
    tenant_id: str
    adapter: str
    version: int
    version_id: str
    version_state: str
    version_code: str | None
    state: str
    attempts: int
    code: str | None
    message: str | None
    created_at: int
    started_at: int | None
    finished_at: int | None
    lease_until: int | None


class ValidationCounts(BaseModel):
    """Of all tenants. `base_changed`: versions that wait for a verdict on a new base model."""

    queued: int
    running: int
    failed: int
    base_changed: int


class ValidationList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ValidationObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    counts: ValidationCounts


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
