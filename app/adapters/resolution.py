"""What a `model` string means to a caller: one resolver answers calls and lists /v1/models."""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters import names_repository, repository, states
from app.adapters.aliases import Target, pick
from app.adapters.models import Adapter, AdapterVersion, Alias, BaseModel
from app.adapters.names import LIVE, MAX_MODEL_CHARS, ModelName, clip, parse_model
from app.adapters.names_repository import Named, NamedAdapter, NamedVersion
from app.audit import service as audit
from app.caller import Caller
from app.db import Database
from app.errors import NotFound
from app.grouping import Grouped
from engine.types import AdapterRef

PAGE = 100
MOST_TOGETHER = 200
"""Most names that one read looks up."""
NOT_READY_CODES = {states.ARCHIVED: "version_archived", "base_changed": "version_base_changed"}
"""Codes of versions that were callable before; any other that is not ready is `model_not_found`."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """What one request runs: an adapter's version, or the base model alone (ids are None)."""

    name: str  # as the caller wrote it
    base_digest: str | None
    adapter_id: str | None = None
    version_id: str | None = None
    version_number: int | None = None
    ref: AdapterRef | None = None
    digest: str | None = None
    adapter_name: str | None = None
    alias: str | None = None  # that led to the version; None where the caller named it


@dataclass(frozen=True, slots=True)
class ListedModel:
    """One entry of /v1/models; a call with `id` is answered."""

    id: str
    created: int  # Unix seconds
    kind: str  # base, adapter, alias, version
    adapter_id: str | None = None
    versions: tuple[int, ...] = ()


class OutOfScope(NotFound):
    """The tenant has the model and this key may not use it; the answer is that of no model."""

    def __init__(self, model: str, adapter_id: str | None) -> None:
        super().__init__(_unknown(model), code="model_not_found", param="model")
        self.adapter_id = adapter_id
        self.model = model


def _unknown(model: str) -> str:
    return (
        f"The model {clip(model)!r} does not exist or this key may not use it; GET /v1/models "
        "lists what it may call."
    )


def not_found(model: str) -> NotFound:
    """The one answer for unknown, foreign, erased and out-of-scope names."""
    return NotFound(_unknown(model), code="model_not_found", param="model")


def _not_ready(model: str, state: str, code: str | None = None) -> NotFound:
    """Said to the owner alone, so it may say why."""
    if state in (states.UPLOADED, states.VALIDATING) and code == "base_changed":
        state = code
    remedy = {
        "base_changed": "the base model was changed, and this version is being validated again",
        states.UPLOADED: "it is waiting for validation",
        states.VALIDATING: "it is still being validated",
        states.REJECTED: "validation rejected it; its version's report says why",
        states.FAILED: "its validation could not be finished; upload it again",
        states.ARCHIVED: "it is archived; POST …/versions/N/unarchive brings it back",
    }
    reason = remedy.get(state, "it has no version that is ready")
    return NotFound(
        f"The model {clip(model)!r} cannot be called: {reason}.",
        code=NOT_READY_CODES.get(state, "model_not_found"),
        param="model",
    )


@asynccontextmanager
async def scoped(
    db: Database, caller: Caller, *, write: bool = False
) -> AsyncIterator[AsyncSession]:
    """A transaction or a read; an OutOfScope that ends it leaves an `authz_fail` audit event."""
    try:
        async with db.transaction() if write else db.reading() as session:
            yield session
    except OutOfScope as refusal:
        await _note(db, caller, refusal)
        raise


async def _note(db: Database, caller: Caller, refusal: OutOfScope) -> None:
    await audit.record_alone(
        db,
        actor=caller,
        action="authz_fail",
        target=refusal.adapter_id or refusal.model,
        tenant_id=caller.tenant_id,
        detail={"reason": "adapter_scope"},
    )


class Resolver:
    """Looks up names for the calls of one process. Nothing is remembered: a call gets what was
    there after it came, and calls that wait together share the look-up."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._look_ups = Grouped(self._look_up, MOST_TOGETHER)

    async def for_call(self, caller: Caller, model: str, *, request_id: str) -> ResolvedModel:
        """What `model` runs for this caller. Raises NotFound, the same for foreign and unknown;
        a key beyond its scope leaves an audit event.

        `request_id` decides between the targets of a weighted alias.
        """
        found = await self._look_ups.do((caller.tenant_id, model))
        try:
            return _resolved(found, caller, model, request_id)
        except OutOfScope as refusal:
            await _note(self._db, caller, refusal)
            raise

    async def _look_up(self, asked: list[tuple[str, str]]) -> list[Named | Exception]:
        found = await self._db.read_briefly(
            lambda connection: {pair: _find(connection, *pair) for pair in set(asked)}
        )
        return [found[pair] for pair in asked]


def _find(connection: Connection, tenant_id: str, model: str) -> Named:
    if len(model) > MAX_MODEL_CHARS or "\0" in model:
        return Named()
    wanted = parse_model(model)
    if wanted is None:
        return Named(base_digest=names_repository.base_digest(connection, model))
    return names_repository.named(connection, tenant_id, model, wanted)


def _resolved(found: Named, caller: Caller, model: str, request_id: str) -> ResolvedModel:
    if found.base_digest is not None:
        if not caller.may_call(model):
            raise OutOfScope(model, None)
        return ResolvedModel(name=model, base_digest=found.base_digest)
    wanted, adapter = parse_model(model), found.adapter
    if wanted is None or adapter is None:
        raise not_found(model)
    if not caller.may_call(adapter.name):
        raise OutOfScope(model, adapter.id)
    version = _version(adapter, caller, wanted, model, request_id)
    return ResolvedModel(
        name=model,
        base_digest=version.base_digest,
        adapter_id=adapter.id,
        version_id=version.id,
        version_number=version.number,
        ref=AdapterRef(salt=caller.tenant_salt, digest=version.digest),
        digest=version.digest,
        adapter_name=adapter.name,
        alias=None if wanted.number is not None else wanted.alias or LIVE,
    )


def _version(
    adapter: NamedAdapter, caller: Caller, wanted: ModelName, model: str, request_id: str
) -> NamedVersion:
    """The version that the name asks for, which must be ready."""
    version = adapter.versions[0] if adapter.versions else None
    if wanted.number is None:
        alias = wanted.alias or LIVE
        if adapter.targets is None:
            if alias != LIVE:
                raise not_found(model)
            raise _not_ready(
                model, version.state if version else "", version.code if version else None
            )
        key = caller.tenant_salt.encode()
        chosen = pick(adapter.targets, request_id, key=key, alias=f"{adapter.id}@{alias}")
        version = adapter.version(chosen.version_id)
    if version is None:
        raise not_found(model)
    if version.state != states.READY:
        raise _not_ready(model, version.state, version.code)
    return version


def targets_of(alias: Alias) -> list[Target]:
    return [Target(str(t["version_id"]), int(t["weight"])) for t in alias.targets]


# --------------------------------------------------------------------------- the list


async def list_models(
    session: AsyncSession, caller: Caller, *, served: Collection[str] | None = None
) -> list[ListedModel]:
    """Everything that a `Resolver` answers for this caller by name.

    `served`: digests of the base models that engines serve now; None lists all that are known.
    """
    listed = [
        ListedModel(id=base.name, created=int(base.first_seen_at.timestamp()), kind="base")
        for base in _one_a_name(await repository.base_models(session))
        if caller.may_call(base.name) and (served is None or base.base_digest in served)
    ]
    async for adapter, versions, aliases in _adapters(session, caller):
        listed.extend(_entries(adapter, versions, aliases))
    return listed


def _one_a_name(bases: Collection[BaseModel]) -> list[BaseModel]:
    """The model last seen under each name, which is the one that the name resolves to."""
    first: dict[str, BaseModel] = {}
    for base in bases:
        first.setdefault(base.name, base)
    return list(first.values())


async def _adapters(
    session: AsyncSession, caller: Caller
) -> AsyncIterator[tuple[Adapter, list[AdapterVersion], list[Alias]]]:
    """The caller's adapters with their ready versions and their aliases."""
    after: str | None = None
    while True:
        page = await repository.page_adapters(
            session, caller.tenant_id, after=after, limit=PAGE, names=caller.adapter_scope
        )
        ids = [adapter.id for adapter in page]
        versions = await repository.versions_of(session, ids)
        aliases = await repository.aliases_of(session, ids)
        for adapter in page:
            yield (
                adapter,
                [v for v in versions if v.adapter_id == adapter.id and v.state == states.READY],
                [a for a in aliases if a.adapter_id == adapter.id],
            )
        if len(page) < PAGE:
            return
        after = page[-1].id


def _entries(
    adapter: Adapter, ready: list[AdapterVersion], aliases: list[Alias]
) -> list[ListedModel]:
    numbers = {version.id: version.number for version in ready}
    entries: list[ListedModel] = []
    for alias in aliases:
        targets = [numbers.get(target.version_id) for target in targets_of(alias)]
        known = tuple(number for number in targets if number is not None)
        if len(known) < len(targets):
            continue  # some requests would not be answered
        name = adapter.name if alias.name == LIVE else f"{adapter.name}@{alias.name}"
        kind = "adapter" if alias.name == LIVE else "alias"
        created = int(alias.updated_at.timestamp())
        entries.append(ListedModel(name, created, kind, adapter.id, known))
    entries.extend(
        ListedModel(
            f"{adapter.name}@v{version.number}",
            int((version.ready_at or version.created_at).timestamp()),
            "version",
            adapter.id,
            (version.number,),
        )
        for version in ready
    )
    return entries
