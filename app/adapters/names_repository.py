"""What a `model` string stands for in the database: a few small statements, made once.

Inside `Database.read_briefly`, because every call asks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, bindparam, literal, select

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


@dataclass(frozen=True, slots=True)
class Named:
    """What there is under one name; a base model's digest goes before an adapter."""

    base_digest: str | None = None
    adapter: NamedAdapter | None = None


_VERSION = ("id", "number", "digest", "state", "code", "base_digest")


def base_digest(connection: Connection, model: str) -> str | None:
    """Of the base model last seen under a name that no adapter can have."""
    found: str | None = connection.execute(select(_base()), {"model": model}).scalar()
    return found


def named(connection: Connection, tenant_id: str, model: str, wanted: ModelName) -> Named:
    """One statement for what most calls name: a base model, a version by its number, or an alias
    with one target. The adapter is the tenant's, and not erased."""
    column: Literal["id", "name"] = "name" if wanted.adapter_id is None else "id"
    row = connection.execute(
        _named(column, "alias" if wanted.number is None else "number"),
        {
            "model": model,
            "tenant_id": tenant_id,
            "value": wanted.adapter_id or wanted.name,
            "alias": wanted.alias or LIVE,
            "number": wanted.number,
        },
    ).one()
    digest, adapter_id, name, listed, *version = row
    if digest is not None or adapter_id is None:
        return Named(base_digest=digest)
    versions: tuple[NamedVersion, ...] = ()
    if version[0] is not None:
        versions = (NamedVersion(*version),)
    targets = None
    if wanted.number is None and listed is not None:
        targets = tuple(Target(str(t["version_id"]), int(t["weight"])) for t in listed)
        if len(targets) > 1:
            versions = _all_targets(connection, targets)
    elif wanted.number is None:
        versions = _newest(connection, adapter_id)
    return Named(adapter=NamedAdapter(adapter_id, name, targets, versions))


@cache
def _base() -> Any:
    return (
        select(BaseModel.base_digest)
        .where(BaseModel.name == bindparam("model"))
        .order_by(BaseModel.last_seen_at.desc())
        .limit(1)
        .scalar_subquery()
    )


@cache
def _named(column: Literal["id", "name"], by: Literal["alias", "number"]) -> Any:
    """Of any tenant: who runs it binds the tenant's id. Always one row."""
    version = AdapterVersion
    called = getattr(Adapter, column) == bindparam("value")
    alias: ColumnElement[bool]
    meant: ColumnElement[bool]
    if by == "number":
        alias = Alias.name.is_(None)
        meant = (version.adapter_id == Adapter.id) & (version.number == bindparam("number"))
    else:
        alias = Alias.name == bindparam("alias")
        meant = version.id == Alias.targets[0]["version_id"].as_string()
    return (
        select(_base(), Adapter.id, Adapter.name, Alias.targets)
        .add_columns(*(getattr(version, name) for name in _VERSION))
        .select_from(select(literal(1).label("one")).subquery())
        .outerjoin(
            Adapter,
            (Adapter.tenant_id == bindparam("tenant_id")) & Adapter.erased_at.is_(None) & called,
        )
        .outerjoin(Alias, (Alias.adapter_id == Adapter.id) & alias)
        .outerjoin(version, meant & (version.state != states.ERASED))
    )


@cache
def _versions(newest: bool) -> Any:
    """By its parent: who runs it has found the adapter by its tenant."""
    row = AdapterVersion
    versions = select(*(getattr(row, name) for name in _VERSION)).where(row.state != states.ERASED)
    if newest:
        of_adapter = versions.where(row.adapter_id == bindparam("adapter_id"))
        return of_adapter.order_by(row.number.desc()).limit(1)
    return versions.where(row.id.in_(bindparam("ids", expanding=True)))


def _all_targets(connection: Connection, targets: Sequence[Target]) -> tuple[NamedVersion, ...]:
    ids = [target.version_id for target in targets]
    found = connection.execute(_versions(newest=False), {"ids": ids})
    return tuple(NamedVersion(*row) for row in found)


def _newest(connection: Connection, adapter_id: str) -> tuple[NamedVersion, ...]:
    found = connection.execute(_versions(newest=True), {"adapter_id": adapter_id})
    return tuple(NamedVersion(*row) for row in found)
