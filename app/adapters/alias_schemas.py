"""The JSON of aliases. Times are Unix seconds, weights are percent."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from app.adapters.aliases import MAX_TARGETS

MAX_NUMBER = 2**31 - 1


class AliasTarget(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    version: int = Field(ge=1, le=MAX_NUMBER)
    weight: int = Field(default=100, ge=0, le=100)


class AliasBody(BaseModel):
    """Weights are whole percents from 1 that sum to 100; each version is named once."""

    model_config = ConfigDict(extra="forbid", strict=True)

    targets: list[AliasTarget] = Field(min_length=1, max_length=MAX_TARGETS)


class PromoteBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    version: int = Field(ge=1, le=MAX_NUMBER, description="one of the alias's targets")


class RollbackBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    to_revision: int | None = Field(
        default=None,
        ge=1,
        le=MAX_NUMBER,
        description="what the alias was at this revision; by default, before its last change",
    )


class AliasObject(BaseModel):
    """`by_hand` is false only for a `live` that follows new versions."""

    object: Literal["adapter.alias"] = "adapter.alias"
    adapter: str
    alias: str
    targets: list[AliasTarget]
    by_hand: bool
    revision: int
    updated_by: str
    updated_at: int


class AliasList(BaseModel):
    object: Literal["list"] = "list"
    data: list[AliasObject]


class DeletedAlias(BaseModel):
    object: Literal["adapter.alias.deleted"] = "adapter.alias.deleted"
    adapter: str
    alias: str
    deleted: Literal[True] = True


class Actor(BaseModel):
    kind: str
    id: str
    label: str


AliasAction = Literal["set", "promote", "rollback", "follow", "release", "delete"]


class AliasChangeObject(BaseModel):
    """`follow`: `live` moved to a new version; `release`: it left a version that was erased."""

    model_config = ConfigDict(populate_by_name=True)

    object: Literal["adapter.alias.change"] = "adapter.alias.change"
    id: str
    alias: str
    revision: int
    action: AliasAction
    before: list[AliasTarget] | None = Field(serialization_alias="from")
    after: list[AliasTarget] | None = Field(serialization_alias="to")
    by_hand: bool
    by: Actor
    at: int


class AliasHistory(BaseModel):
    """A page, newest first: ask again with `before` = `next_before` while `has_more`."""

    object: Literal["list"] = "list"
    data: list[AliasChangeObject]
    has_more: bool
    next_before: int | None
