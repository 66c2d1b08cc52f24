"""The rows of the adapters domain.

An Adapter is a tenant's name; an AdapterVersion is immutable content under it; an Alias points a
word at versions by weight. A ValidationRun is the queue of record: the broker only carries hints.
"""

from datetime import datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    ForeignKey,
    Index,
    Integer,
    String,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from app.db import Base, Json


class BaseModel(Base):
    """A base model that an engine described: `description` is the whole ModelDescription."""

    __tablename__ = "base_models"

    base_digest: Mapped[str] = mapped_column(String(128), primary_key=True)
    name: Mapped[str] = mapped_column(String(200))
    tokenizer_digest: Mapped[str] = mapped_column(String(128))
    description: Mapped[dict[str, Any]] = mapped_column(Json)
    first_seen_at: Mapped[datetime]
    last_seen_at: Mapped[datetime]


class Adapter(Base):
    """A name that a tenant gave. Deleting it frees the name; the row stays for the ledger."""

    __tablename__ = "adapters"
    __table_args__ = (
        Index(
            "uq_adapters_live_name",
            "tenant_id",
            "name",
            unique=True,
            sqlite_where=text("erased_at IS NULL"),
            postgresql_where=text("erased_at IS NULL"),
        ),
    )

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(40), ForeignKey("tenants.id"))
    name: Mapped[str] = mapped_column(String(63))
    created_by: Mapped[str] = mapped_column(String(80))
    created_at: Mapped[datetime]
    erased_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]  # by a call; at most a minute behind


class AdapterVersion(Base):
    """One upload's content, by digest. Only its state and what validation found change."""

    __tablename__ = "adapter_versions"
    __table_args__ = (
        UniqueConstraint("adapter_id", "number", name="uq_adapter_versions_number"),
        Index(
            "uq_adapter_versions_live_digest",
            "adapter_id",
            "digest",
            unique=True,
            sqlite_where=text("state != 'erased'"),
            postgresql_where=text("state != 'erased'"),
        ),
        Index("ix_adapter_versions_tenant_digest", "tenant_id", "digest"),
    )

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    adapter_id: Mapped[str] = mapped_column(String(40), ForeignKey("adapters.id"))
    tenant_id: Mapped[str] = mapped_column(String(40), ForeignKey("tenants.id"))
    number: Mapped[int] = mapped_column(Integer)
    digest: Mapped[str] = mapped_column(String(64))
    state: Mapped[str] = mapped_column(String(16))
    code: Mapped[str | None] = mapped_column(String(64))  # why rejected or failed
    reason: Mapped[str | None] = mapped_column(Text)
    config_bytes: Mapped[int] = mapped_column(BigInteger)
    weights_bytes: Mapped[int] = mapped_column(BigInteger)
    rank: Mapped[int | None] = mapped_column(Integer)  # the largest in it
    targets: Mapped[list[str] | None] = mapped_column(Json)
    base_digest: Mapped[str | None] = mapped_column(String(128))  # validated against
    created_by: Mapped[str] = mapped_column(String(80))
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]
    ready_at: Mapped[datetime | None]
    erased_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]  # by a call; at most a minute behind


class Alias(Base):
    """`targets`: [{"version_id", "weight"}], weights sum to 100.

    Written by `app.adapters.alias_changes` alone, which counts `revision` and keeps the history.
    """

    __tablename__ = "adapter_aliases"

    adapter_id: Mapped[str] = mapped_column(String(40), ForeignKey("adapters.id"), primary_key=True)
    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(40), ForeignKey("tenants.id"))
    targets: Mapped[list[dict[str, Any]]] = mapped_column(Json)
    by_hand: Mapped[bool] = mapped_column(Boolean)  # then new versions leave it alone
    revision: Mapped[int] = mapped_column(Integer, server_default="1")
    updated_by: Mapped[str] = mapped_column(String(80))
    updated_at: Mapped[datetime]


class AliasChange(Base):
    """One change of an alias, kept when the alias is gone; revisions go on counting then.

    `before` and `targets`: [{"version_id", "version", "weight"}], None where there was no alias.
    """

    __tablename__ = "adapter_alias_changes"
    __table_args__ = (
        UniqueConstraint(
            "adapter_id", "name", "revision", name="uq_adapter_alias_changes_revision"
        ),
    )

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    adapter_id: Mapped[str] = mapped_column(String(40), ForeignKey("adapters.id"))
    name: Mapped[str] = mapped_column(String(63))
    tenant_id: Mapped[str] = mapped_column(String(40), ForeignKey("tenants.id"))
    revision: Mapped[int] = mapped_column(Integer)
    action: Mapped[str] = mapped_column(String(12))  # set promote rollback follow release delete
    before: Mapped[list[dict[str, Any]] | None] = mapped_column(Json)
    targets: Mapped[list[dict[str, Any]] | None] = mapped_column(Json)
    by_hand: Mapped[bool] = mapped_column(Boolean)
    actor_kind: Mapped[str] = mapped_column(String(16))
    actor_id: Mapped[str] = mapped_column(String(40))
    actor_label: Mapped[str] = mapped_column(String(254))
    at: Mapped[datetime]


class ValidationRun(Base):
    """One validation of one version. Whoever holds the unexpired lease works on it."""

    __tablename__ = "validation_runs"
    __table_args__ = (
        Index("ix_validation_runs_open", "state", "lease_until"),
        Index("ix_validation_runs_version_id", "version_id"),
        Index(
            "uq_validation_runs_open_version",
            "version_id",
            unique=True,
            sqlite_where=text("state IN ('queued', 'running')"),
            postgresql_where=text("state IN ('queued', 'running')"),
        ),
    )

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    version_id: Mapped[str] = mapped_column(String(40), ForeignKey("adapter_versions.id"))
    tenant_id: Mapped[str] = mapped_column(String(40), ForeignKey("tenants.id"))
    state: Mapped[str] = mapped_column(String(16))  # queued running done failed cancelled
    attempts: Mapped[int] = mapped_column(Integer)
    owner: Mapped[str | None] = mapped_column(String(40))
    lease_until: Mapped[datetime | None]
    not_before: Mapped[datetime | None]
    sent_at: Mapped[datetime | None]  # when a task message was last put on the broker
    code: Mapped[str | None] = mapped_column(String(64))  # of the last attempt that failed
    message: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]


class Check(Base):
    """What one group of a run found, written as soon as it is known."""

    __tablename__ = "validation_checks"
    __table_args__ = (UniqueConstraint("run_id", "position", name="uq_validation_checks_position"),)

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    run_id: Mapped[str] = mapped_column(String(40), ForeignKey("validation_runs.id"))
    version_id: Mapped[str] = mapped_column(String(40), ForeignKey("adapter_versions.id"))
    position: Mapped[int] = mapped_column(Integer)
    check_group: Mapped[str] = mapped_column(String(16))  # container config coverage numbers …
    status: Mapped[str] = mapped_column(String(8))  # pass warn fail
    findings: Mapped[list[dict[str, Any]]] = mapped_column(Json)
    figures: Mapped[dict[str, Any]] = mapped_column(Json)
    duration_ms: Mapped[int] = mapped_column(Integer)
    created_at: Mapped[datetime]


class Erasure(Base):
    """A receipt: what was removed where, and which engines have yet to say so."""

    __tablename__ = "erasures"
    __table_args__ = (Index("ix_erasures_complete", "complete"),)

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(40), ForeignKey("tenants.id"))
    adapter_id: Mapped[str] = mapped_column(String(40), ForeignKey("adapters.id"))
    complete: Mapped[bool] = mapped_column(Boolean)
    items: Mapped[list[dict[str, Any]]] = mapped_column(Json)
    created_by: Mapped[str] = mapped_column(String(80))
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]


class UploadKey(Base):
    """An Idempotency-Key seen on an upload: the same key answers with the same version."""

    __tablename__ = "upload_keys"

    tenant_id: Mapped[str] = mapped_column(String(40), ForeignKey("tenants.id"), primary_key=True)
    key_hash: Mapped[str] = mapped_column(String(64), primary_key=True)
    version_id: Mapped[str] = mapped_column(String(40), ForeignKey("adapter_versions.id"))
    fingerprint: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[datetime]


class Upload(Base):
    """An upload in parts. Part 0 is the config, parts 1… are the weights, `part_bytes` each.

    While it is `open` its bytes are reserved of the tenant's quota.
    """

    __tablename__ = "uploads"
    __table_args__ = (
        CheckConstraint("state IN ('open', 'completed')", name="state"),
        Index("ix_uploads_tenant_id_state", "tenant_id", "state"),
        Index("ix_uploads_expires_at", "expires_at"),
    )

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(40), ForeignKey("tenants.id"))
    name: Mapped[str] = mapped_column(String(63))
    state: Mapped[str] = mapped_column(String(16))
    config_bytes: Mapped[int] = mapped_column(BigInteger)
    weights_bytes: Mapped[int] = mapped_column(BigInteger)
    part_bytes: Mapped[int] = mapped_column(BigInteger)
    weights_sha256: Mapped[str | None] = mapped_column(String(64))
    version_id: Mapped[str | None] = mapped_column(String(40), ForeignKey("adapter_versions.id"))
    created_by: Mapped[str] = mapped_column(String(80))
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime]


class UploadPart(Base):
    """A part that has arrived; `stored_as` is its name in the store, new with every sending."""

    __tablename__ = "upload_parts"

    upload_id: Mapped[str] = mapped_column(String(40), ForeignKey("uploads.id"), primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True)
    stored_as: Mapped[str] = mapped_column(String(64))
    nbytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[datetime]
