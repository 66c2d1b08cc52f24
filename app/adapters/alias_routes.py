"""/v1/adapters/{name}/aliases. Answers carry the alias's revision as their ETag."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response

from app.adapters import alias_service, comparison
from app.adapters.alias_schemas import (
    AliasBody,
    AliasHistory,
    AliasList,
    AliasObject,
    DeletedAlias,
    PromoteBody,
    RollbackBody,
)
from app.adapters.comparison_schemas import Comparison, Window
from app.adapters.deps import ResourcesDep
from app.adapters.resolution import scoped
from app.auth import ApiCaller
from app.preconditions import PreconditionDep, etag

router = APIRouter(prefix="/v1/adapters/{name}/aliases", tags=["aliases"])

Name = Annotated[str, Path(max_length=200)]


def _tagged(response: Response, alias: AliasObject) -> AliasObject:
    response.headers["ETag"] = etag(alias.revision)
    return alias


@router.get("")
async def list_aliases(name: Name, caller: ApiCaller, resources: ResourcesDep) -> AliasList:
    async with scoped(resources.db, caller) as session:
        return AliasList(data=await alias_service.list_aliases(session, caller, name))


@router.get("/{alias}")
async def get_alias(
    name: Name, alias: Name, response: Response, caller: ApiCaller, resources: ResourcesDep
) -> AliasObject:
    async with scoped(resources.db, caller) as session:
        return _tagged(response, await alias_service.get_alias(session, caller, name, alias))


@router.put("/{alias}")
async def put_alias(
    name: Name,
    alias: Name,
    body: AliasBody,
    response: Response,
    caller: ApiCaller,
    resources: ResourcesDep,
    expected: PreconditionDep,
) -> AliasObject:
    """Points an alias at ready versions by weight; `live` then no longer follows new versions."""
    weights = [(target.version, target.weight) for target in body.targets]
    async with scoped(resources.db, caller, write=True) as session:
        moved = await alias_service.set_alias(
            session, caller, name, alias, weights, now=resources.clock.now(), expected=expected
        )
    return _tagged(response, moved)


@router.delete("/{alias}")
async def delete_alias(
    name: Name,
    alias: Name,
    caller: ApiCaller,
    resources: ResourcesDep,
    expected: PreconditionDep,
) -> DeletedAlias:
    """Takes the alias away. `live` is handed back instead and follows new versions again."""
    async with scoped(resources.db, caller, write=True) as session:
        await alias_service.remove(
            session, caller, name, alias, now=resources.clock.now(), expected=expected
        )
    return DeletedAlias(adapter=name, alias=alias)


@router.post("/{alias}/promote")
async def promote(
    name: Name,
    alias: Name,
    body: PromoteBody,
    response: Response,
    caller: ApiCaller,
    resources: ResourcesDep,
    expected: PreconditionDep,
) -> AliasObject:
    """Gives one target all requests. Sent again, it changes nothing."""
    async with scoped(resources.db, caller, write=True) as session:
        moved = await alias_service.promote(
            session, caller, name, alias, body.version, now=resources.clock.now(), expected=expected
        )
    return _tagged(response, moved)


@router.post("/{alias}/rollback")
async def roll_back(
    name: Name,
    alias: Name,
    response: Response,
    caller: ApiCaller,
    resources: ResourcesDep,
    expected: PreconditionDep,
    body: RollbackBody | None = None,
) -> AliasObject:
    """Makes the alias what it was before its last change. Sent again, it changes nothing; to go
    further back, name the revision."""
    async with scoped(resources.db, caller, write=True) as session:
        moved = await alias_service.roll_back(
            session,
            caller,
            name,
            alias,
            to_revision=None if body is None else body.to_revision,
            now=resources.clock.now(),
            expected=expected,
        )
    return _tagged(response, moved)


@router.get("/{alias}/history")
async def history(
    name: Name,
    alias: Name,
    caller: ApiCaller,
    resources: ResourcesDep,
    before: Annotated[int | None, Query(ge=1, le=2**31 - 1, description="`next_before`")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> AliasHistory:
    """Who moved it, when, from what to what; newest first."""
    async with scoped(resources.db, caller) as session:
        return await alias_service.history(session, caller, name, alias, before=before, limit=limit)


@router.get("/{alias}/comparison")
async def compare(
    name: Name,
    alias: Name,
    caller: ApiCaller,
    resources: ResourcesDep,
    window: Annotated[
        Window, Query(description="since the alias last changed (30 days at most), or the last …")
    ] = "change",
) -> Comparison:
    """The targets side by side: requests, errors, finish reasons, lengths and latencies of the
    calls that came by this alias."""
    async with scoped(resources.db, caller) as session:
        return await comparison.compare(session, caller, name, alias, window, resources.clock.now())
