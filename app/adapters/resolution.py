"""What a `model` string means to a caller: one resolver answers calls and lists /v1/models."""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters import repository, states
from app.adapters.aliases import Target, pick
from app.adapters.models import Adapter, AdapterVersion, Alias, BaseModel
from app.adapters.names import LIVE, MAX_MODEL_CHARS, ModelName, clip, parse_model
from app.audit import service as audit
from app.caller import Caller
from app.db import Database
from app.errors import NotFound
from engine.types import AdapterRef

PAGE = 100
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


async def resolve_for_call(
    db: Database, caller: Caller, model: str, *, request_id: str
) -> ResolvedModel:
    """`resolve_model` in a read of its own; a key beyond its scope leaves an audit event."""
    async with scoped(db, caller) as session:
        return await resolve_model(session, caller, model, request_id=request_id)


@asynccontextmanager
async def scoped(
    db: Database, caller: Caller, *, write: bool = False
) -> AsyncIterator[AsyncSession]:
    """A transaction or a read; an OutOfScope that ends it leaves an `authz_fail` audit event."""
    try:
        async with db.transaction() if write else db.reading() as session:
            yield session
    except OutOfScope as refusal:
        await audit.record_alone(
            db,
            actor=caller,
            action="authz_fail",
            target=refusal.adapter_id or refusal.model,
            tenant_id=caller.tenant_id,
            detail={"reason": "adapter_scope"},
        )
        raise


async def resolve_model(
    session: AsyncSession, caller: Caller, model: str, *, request_id: str = ""
) -> ResolvedModel:
    """What `model` runs for this caller. Raises NotFound, the same for foreign and unknown.

    `request_id` decides between the targets of a weighted alias.
    """
    base = await repository.base_named(session, model) if len(model) <= MAX_MODEL_CHARS else None
    if base is not None:
        if not caller.may_call(base.name):
            raise OutOfScope(model, None)
        return ResolvedModel(name=model, base_digest=base.base_digest)
    wanted = parse_model(model)
    if wanted is None:
        raise not_found(model)
    adapter = await _adapter(session, caller, wanted)
    if adapter is None:
        raise not_found(model)
    if not caller.may_call(adapter.name):
        raise OutOfScope(model, adapter.id)
    version = await _version(session, caller, adapter, wanted, model, request_id)
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


async def _adapter(session: AsyncSession, caller: Caller, wanted: ModelName) -> Adapter | None:
    if wanted.adapter_id is not None:
        return await repository.live_adapter_by_id(session, caller.tenant_id, wanted.adapter_id)
    return await repository.live_adapter(session, caller.tenant_id, wanted.name or "")


async def _version(
    session: AsyncSession,
    caller: Caller,
    adapter: Adapter,
    wanted: ModelName,
    model: str,
    request_id: str,
) -> AdapterVersion:
    """The version that the name asks for, which must be ready."""
    if wanted.number is not None:
        version = await repository.version_numbered(session, adapter.id, wanted.number)
    else:
        alias = await repository.alias(session, adapter.id, wanted.alias or LIVE)
        if alias is None:
            if wanted.alias in (None, LIVE):
                versions = await repository.versions_of(session, [adapter.id])
                newest = versions[-1] if versions else None
                raise _not_ready(
                    model, newest.state if newest else "", newest.code if newest else None
                )
            raise not_found(model)
        chosen = pick(
            targets_of(alias),
            request_id,
            key=caller.tenant_salt.encode(),
            alias=f"{adapter.id}@{alias.name}",
        )
        version = await repository.version_by_id(session, chosen.version_id)
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
    """Everything that `resolve_model` answers for this caller by name.

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
