"""The one place that writes an alias: its row, its next revision and its history together.

Callers hold the tenant's lock (`repository.lock_tenant`), so revisions never collide.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters import alias_repository, repository
from app.adapters.models import Alias, AliasChange
from app.audit import service as audit
from app.caller import Caller
from app.ids import new_id

Action = Literal["set", "promote", "rollback", "follow", "release", "delete"]


@dataclass(frozen=True, slots=True)
class AliasKey:
    adapter_id: str
    tenant_id: str
    name: str


@dataclass(frozen=True, slots=True)
class NewTarget:
    """A version under an alias, with the number that people know it by."""

    version_id: str
    version: int
    weight: int

    def as_json(self) -> dict[str, Any]:
        return {"version_id": self.version_id, "version": self.version, "weight": self.weight}


async def write_alias(
    session: AsyncSession,
    key: AliasKey,
    targets: Sequence[NewTarget],
    *,
    action: Action,
    by_hand: bool,
    actor: Caller | str,
    now: datetime,
) -> Alias:
    """Points the alias at `targets`, which the caller has checked. Returns the row."""
    last = await alias_repository.last_change(session, key.adapter_id, key.name)
    row = await repository.alias(session, key.adapter_id, key.name)
    if row is None:
        row = Alias(adapter_id=key.adapter_id, name=key.name, tenant_id=key.tenant_id)
        session.add(row)
    row.targets = [{"version_id": t.version_id, "weight": t.weight} for t in targets]
    row.by_hand = by_hand
    row.revision = 1 if last is None else last.revision + 1
    row.updated_by = audit.actor_id(actor)
    row.updated_at = now
    _remember(session, key, last, targets, action=action, by_hand=by_hand, actor=actor, now=now)
    await session.flush()
    return row


async def delete_alias(
    session: AsyncSession, row: Alias, *, action: Action, actor: Caller | str, now: datetime
) -> None:
    """Takes the alias away; its history stays and its revisions are not reused."""
    key = AliasKey(row.adapter_id, row.tenant_id, row.name)
    last = await alias_repository.last_change(session, key.adapter_id, key.name)
    await session.delete(row)
    _remember(session, key, last, None, action=action, by_hand=False, actor=actor, now=now)
    await session.flush()


def _remember(
    session: AsyncSession,
    key: AliasKey,
    last: AliasChange | None,
    targets: Sequence[NewTarget] | None,
    *,
    action: Action,
    by_hand: bool,
    actor: Caller | str,
    now: datetime,
) -> None:
    session.add(
        AliasChange(
            id=new_id("alc"),
            adapter_id=key.adapter_id,
            name=key.name,
            tenant_id=key.tenant_id,
            revision=1 if last is None else last.revision + 1,
            action=action,
            before=None if last is None else last.targets,
            targets=None if targets is None else [target.as_json() for target in targets],
            by_hand=by_hand,
            actor_kind="system" if isinstance(actor, str) else actor.role,
            actor_id=audit.actor_id(actor),
            actor_label=(actor if isinstance(actor, str) else actor.label)[:254],
            at=now,
        )
    )
