"""What a `model` string stands for in the database: a few small statements, made once.

Inside `Database.read_in_thread`, because every call asks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from sqlalchemy import Connection, bindparam, select

from app.adapters import states
from app.adapters.aliases import Target
from app.adapters.models import Adapter, AdapterVersion, Alias, BaseModel
from app.adapters.names import LIVE, ModelName


@dataclass(frozen=True, slots=True)
class NamedVersion:
    id: str
    number: int
    digest: str
    state: str
    code: str | None
    base_digest: str | None


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """`targets`: of the alias, None where the name has no alias or there is none so called.

    `versions`: the one of that number, or the alias's targets; where `live` was meant and is not
    there, the newest one.
    """

    id: str
    name: str
    targets: tuple[Target, ...] | None
    versions: tuple[NamedVersion, ...]

    def version(self, version_id: str) -> NamedVersion | None:
        return next((v for v in self.versions if v.id == version_id), None)


@cache
def _base() -> Any:
    return (
        select(BaseModel.base_digest)
        .where(BaseModel.name == bindparam("name"))
        .order_by(BaseModel.last_seen_at.desc())
        .limit(1)
    )


@cache
def _adapter(column: Literal["id", "name"]) -> Any:
    """Of any tenant: who runs it binds the tenant's id."""
    return (
        select(Adapter.id, Adapter.name, Alias.targets)
        .outerjoin(Alias, (Alias.adapter_id == Adapter.id) & (Alias.name == bindparam("alias")))
        .where(Adapter.tenant_id == bindparam("tenant_id"), Adapter.erased_at.is_(None))
        .where(getattr(Adapter, column) == bindparam("value"))
    )


@cache
def _version(which: Literal["targets", "numbered", "newest"]) -> Any:
    """By its parent: who runs it has found the adapter by its tenant."""
    row = AdapterVersion
    columns = (row.id, row.number, row.digest, row.state, row.code, row.base_digest)
    versions = select(*columns).where(row.state != states.ERASED)
    if which == "targets":
        return versions.where(row.id.in_(bindparam("ids", expanding=True)))
    versions = versions.where(row.adapter_id == bindparam("adapter_id"))
    if which == "numbered":
        return versions.where(row.number == bindparam("number"))
    return versions.order_by(row.number.desc()).limit(1)


def base_digest(connection: Connection, name: str) -> str | None:
    """Of the base model last seen under that name."""
    found: str | None = connection.execute(_base(), {"name": name}).scalar()
    return found


def adapter(connection: Connection, tenant_id: str, wanted: ModelName) -> NamedAdapter | None:
    """The tenant's adapter that is called so and is not erased."""
    alias = None if wanted.number is not None else wanted.alias or LIVE
    column: Literal["id", "name"] = "name" if wanted.adapter_id is None else "id"
    asked = {"tenant_id": tenant_id, "alias": alias, "value": wanted.adapter_id or wanted.name}
    row = connection.execute(_adapter(column), asked).first()
    if row is None:
        return None
    targets = None
    if row[2] is not None:
        targets = tuple(Target(str(t["version_id"]), int(t["weight"])) for t in row[2])
    return NamedAdapter(row[0], row[1], targets, _versions(connection, row[0], wanted, targets))


def _versions(
    connection: Connection,
    adapter_id: str,
    wanted: ModelName,
    targets: Sequence[Target] | None,
) -> tuple[NamedVersion, ...]:
    """By its parent: the adapter was found by its tenant."""
    which: Literal["targets", "numbered", "newest"] = "newest"
    asked: dict[str, Any] = {"adapter_id": adapter_id}
    if targets is not None:
        which, asked = "targets", {"ids": [target.version_id for target in targets]}
    elif wanted.number is not None:
        which, asked = "numbered", asked | {"number": wanted.number}
    found = connection.execute(_version(which), asked)
    return tuple(NamedVersion(*row) for row in found)
