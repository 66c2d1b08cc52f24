"""Rows of the adapters domain as the objects of its API."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, cast

from app.adapters.alias_schemas import (
    Actor,
    AliasChangeObject,
    AliasObject,
    AliasTarget,
)
from app.adapters.models import (
    Adapter,
    AdapterVersion,
    Alias,
    AliasChange,
    Check,
    Erasure,
    ValidationRun,
)
from app.adapters.schemas import (
    AdapterObject,
    CheckObject,
    ErasedItem,
    ErasureReceipt,
    FindingObject,
    ReportObject,
    VersionObject,
)

BACKUPS = (
    "Backups of the database and of the adapter store that the operator makes are outside this "
    "erasure; they keep the files until they are rotated."
)


def unix(at: datetime) -> int:
    return int(at.timestamp())


def unix_or_none(at: datetime | None) -> int | None:
    return None if at is None else unix(at)


def check_object(check: Check) -> CheckObject:
    return CheckObject(
        group=check.check_group,
        status=cast("Any", check.status),
        findings=[FindingObject.model_validate(entry) for entry in check.findings],
        figures=check.figures,
        duration_ms=check.duration_ms,
    )


def report_object(run: ValidationRun, checks: Iterable[Check]) -> ReportObject:
    return ReportObject(
        state=run.state,
        attempts=run.attempts,
        message=run.message,
        checks=[check_object(check) for check in checks],
    )


def version_object(
    adapter: Adapter, version: AdapterVersion, report: ReportObject | None = None
) -> VersionObject:
    return VersionObject(
        id=version.id,
        adapter_id=adapter.id,
        adapter=adapter.name,
        version=version.number,
        state=version.state,
        code=version.code,
        reason=version.reason,
        digest=version.digest,
        config_bytes=version.config_bytes,
        weights_bytes=version.weights_bytes,
        rank=version.rank,
        targets=version.targets,
        base_digest=version.base_digest,
        created_at=unix(version.created_at),
        ready_at=unix_or_none(version.ready_at),
        last_used_at=unix_or_none(version.last_used_at),
        report=report,
    )


def alias_object(adapter: Adapter, alias: Alias, numbers: Mapping[str, int]) -> AliasObject:
    """`numbers`: version id -> number of the adapter's versions."""
    return AliasObject(
        adapter=adapter.name,
        alias=alias.name,
        targets=[
            AliasTarget(version=numbers[target["version_id"]], weight=target["weight"])
            for target in alias.targets
            if target["version_id"] in numbers
        ],
        by_hand=alias.by_hand,
        revision=alias.revision,
        updated_by=alias.updated_by,
        updated_at=unix(alias.updated_at),
    )


def change_object(change: AliasChange) -> AliasChangeObject:
    return AliasChangeObject(
        id=change.id,
        alias=change.name,
        revision=change.revision,
        action=cast("Any", change.action),
        before=_shares(change.before),
        after=_shares(change.targets),
        by_hand=change.by_hand,
        by=Actor(kind=change.actor_kind, id=change.actor_id, label=change.actor_label),
        at=unix(change.at),
    )


def _shares(targets: Sequence[Mapping[str, Any]] | None) -> list[AliasTarget] | None:
    if targets is None:
        return None
    return [AliasTarget(version=t["version"], weight=t["weight"]) for t in targets]


def adapter_object(
    adapter: Adapter, versions: Sequence[AdapterVersion], aliases: Sequence[Alias]
) -> AdapterObject:
    """`versions` and `aliases` may be those of several adapters."""
    own = [version for version in versions if version.adapter_id == adapter.id]
    numbers = {version.id: version.number for version in own}
    return AdapterObject(
        id=adapter.id,
        name=adapter.name,
        created_at=unix(adapter.created_at),
        last_used_at=unix_or_none(adapter.last_used_at),
        versions=[version_object(adapter, version) for version in own],
        aliases=[alias_object(adapter, a, numbers) for a in aliases if a.adapter_id == adapter.id],
    )


def receipt_object(erasure: Erasure) -> ErasureReceipt:
    return ErasureReceipt(
        id=erasure.id,
        adapter_id=erasure.adapter_id,
        complete=erasure.complete,
        items=[ErasedItem.model_validate(item) for item in erasure.items],
        backups=BACKUPS,
        created_at=unix(erasure.created_at),
    )
