"""Pages about adapters: the list, one adapter with its versions and aliases, upload."""

import re
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse

from app.adapters import alias_service, erasure, service, uploads
from app.adapters.alias_schemas import AliasObject
from app.adapters.deps import GateDep, ResourcesDep
from app.adapters.listing import AdapterRow, adapter_table, newest_live
from app.adapters.names import LIVE
from app.auth import SessionUser, TenantAdmin
from app.caller import Caller
from app.console.figures import size
from app.console.forms import Form, read_form
from app.console.render import render
from app.console.tables import PageNumber, Search, Sort, TableView
from app.console.version_views import shares, shown_version
from app.deps import PlatformDep
from app.errors import AppError, Conflict, Forbidden, InvalidRequest
from app.platform import Platform
from app.preconditions import PreconditionFailed

router = APIRouter(prefix="/console/adapters", include_in_schema=False)

State = Literal["", "uploaded", "validating", "ready", "rejected", "failed", "archived"]
STATES: tuple[State, ...] = ("uploaded", "validating", "ready", "rejected", "failed", "archived")
MOST_CHIPS = 3
MOST_OFFERED = 100
"""Ready versions that a list to choose from holds, the newest of them."""
HEAD_BYTES = 1024
TYPED_NAME = re.compile(rb'name="name"\r\n\r\n([^\r\n]{0,200})\r\n')
Name = Annotated[str, Path(max_length=200)]
Number = Annotated[int, Path(ge=1, le=2**31 - 1)]


def tenant_only(caller: Caller) -> None:
    """An operator has no adapters of their own. Raises Forbidden."""
    if not caller.tenant_id:
        raise Forbidden("Operators have no adapters; sign in as a user of a tenant.")


def may_write(caller: Caller) -> bool:
    return caller.role == "tenant_admin"


@router.get("")
async def adapters_page(
    request: Request,
    caller: SessionUser,
    platform: PlatformDep,
    q: Search = "",
    sort: Sort = "",
    page: PageNumber = 1,
    state: Annotated[State, Query()] = "",
) -> Response:
    tenant_only(caller)
    view = TableView("/console/adapters", q, sort, page, {"state": state})
    async with platform.db.reading() as session:
        found = await adapter_table(session, caller, view.wanted, state=state or None)
    return render(
        request,
        "adapters.html",
        adapters=[_row(row) for row in found.rows],
        view=TableView(view.path, q, sort, page, view.kept, found.total),
        state=state,
        states=STATES,
        may_write=may_write(caller),
        base_model=base_model_name(platform),
    )


def base_model_name(platform: Platform) -> str:
    """What the engines serve, or the configured file before one was heard of."""
    for engine in platform.engines.all if platform.engines is not None else ():
        if engine.description is not None:
            return str(engine.description.name)
    return platform.settings.base_model.stem


async def newest_model(platform: Platform, caller: Caller) -> str:
    """What somebody who names no model most likely wants: their newest adapter, else the base."""
    async with platform.db.reading() as session:
        newest = await newest_live(session, caller)
    return newest or base_model_name(platform)


@router.get("/upload")
async def upload_page(
    request: Request,
    caller: TenantAdmin,
    platform: PlatformDep,
    name: Annotated[str, Query(max_length=64)] = "",
) -> Response:
    tenant_only(caller)
    return _upload_form(request, platform, name=name)


@router.post("/upload")
async def upload(
    request: Request,
    caller: TenantAdmin,
    platform: PlatformDep,
    resources: ResourcesDep,
    gate: GateDep,
) -> Response:
    """The plain form, in one go; a page's script uploads in parts, by /console/uploads."""
    tenant_only(caller)
    length = request.headers.get("content-length", "")
    by_script = "application/json" in request.headers.get("accept", "")
    head = bytearray()

    async def body() -> AsyncIterator[bytes]:
        async for chunk in request.stream():
            head.extend(chunk[: HEAD_BYTES - len(head)])
            yield chunk

    try:
        received = await uploads.receive(
            resources,
            gate,
            caller,
            body(),
            content_type=request.headers.get("content-type", ""),
            content_length=int(length) if length.isdigit() else None,
        )
    except AppError as error:
        if by_script:
            return JSONResponse(error.body(), status_code=error.status, headers=error.headers())
        return _upload_form(request, platform, name=_typed_name(bytes(head)), error=error)
    version = received.version
    location = f"/console/adapters/{version.adapter}/versions/{version.version}"
    if by_script:
        return JSONResponse({"location": location})
    return RedirectResponse(location, status_code=303)


@router.get("/{name}")
async def adapter_page(
    name: Name,
    request: Request,
    caller: SessionUser,
    platform: PlatformDep,
    page: PageNumber = 1,
) -> Response:
    tenant_only(caller)
    return await _adapter_page(request, platform, caller, name, page=page)


@router.post("/{name}/aliases")
async def create_alias(
    name: Name, request: Request, caller: TenantAdmin, platform: PlatformDep
) -> Response:
    """Points a new alias at one version; its own page shares out weights."""
    tenant_only(caller)
    form = await read_form(request)
    async with platform.db.reading() as session:
        await service.find_adapter(session, caller, name)
    try:
        alias, number = form.text("alias"), form.integer("version", 0)
        async with platform.db.transaction() as session:
            await alias_service.set_alias(
                session,
                caller,
                name,
                alias,
                [(number, 100)],
                now=platform.clock.now(),
                expected=alias_service.ONLY_NEW,
            )
    except PreconditionFailed:
        taken = Conflict(
            f"There is an alias {alias[:64]!r} already; open it to change what it points at.",
            param="alias",
        )
        return await _adapter_page(request, platform, caller, name, form=form, error=taken)
    except AppError as error:
        return await _adapter_page(request, platform, caller, name, form=form, error=error)
    return RedirectResponse(f"/console/adapters/{name}/aliases/{alias}", status_code=303)


@router.post("/{name}/delete")
async def delete_adapter(
    name: Name, request: Request, caller: TenantAdmin, resources: ResourcesDep
) -> Response:
    tenant_only(caller)
    form = await read_form(request)
    if form.text("confirm") != name:
        raise InvalidRequest(
            f"Nothing was erased: to confirm, type the adapter's name, {name[:64]}.",
            param="confirm",
        )
    await erasure.erase(resources, caller, name)
    return RedirectResponse("/console/adapters", status_code=303)


async def _adapter_page(
    request: Request,
    platform: Platform,
    caller: Caller,
    name: str,
    *,
    page: int = 1,
    form: Form | None = None,
    error: AppError | None = None,
) -> Response:
    async with platform.db.reading() as session:
        adapter = await service.get_adapter(session, caller, name)
    pointing: dict[int, list[str]] = {}
    for alias in adapter.aliases:
        for target in alias.targets:
            label = alias.alias if target.weight == 100 else f"{alias.alias} {target.weight} %"
            pointing.setdefault(target.version, []).append(label)
    versions = sorted(adapter.versions, key=lambda version: -version.version)
    view = TableView(f"/console/adapters/{adapter.name}", page=page, total=len(versions))
    shown = versions[view.first - 1 : view.last]
    return render(
        request,
        "adapter.html",
        adapter={"name": adapter.name, "id": adapter.id, "live": bool(_live(adapter.aliases))},
        aliases=[_alias(alias) for alias in adapter.aliases],
        versions=[shown_version(v, pointing.get(v.version, [])) for v in shown],
        view=view,
        ready=[version.version for version in versions if version.state == "ready"][:MOST_OFFERED],
        typed={} if form is None else form.fields,
        error=error,
        may_write=may_write(caller),
    )


def _typed_name(head: bytes) -> str:
    """The name as it was typed, from the beginning of the form's body; "" where it is not there."""
    found = TYPED_NAME.search(head)
    return "" if found is None else found[1].decode("utf-8", "replace")


def _upload_form(
    request: Request, platform: Platform, *, name: str = "", error: AppError | None = None
) -> Response:
    limit = platform.settings.max_adapter_bytes
    return render(
        request,
        "upload.html",
        name=name,
        max_bytes=limit,
        max_size=size(limit),
        error=error,
    )


def _row(row: AdapterRow) -> dict[str, Any]:
    """`chips`: (alias, what it points at) of a few aliases; `more`: how many others there are."""
    newest = row.newest
    shown = [_alias(alias) for alias in row.aliases]
    return {
        "name": row.adapter.name,
        "last_used_at": row.adapter.last_used_at,
        "newest": None if newest is None else newest.number,
        "state": None if newest is None else newest.state,
        "rank": None if newest is None else newest.rank,
        "size": None if newest is None else size(newest.config_bytes + newest.weights_bytes),
        "uploaded_at": None if newest is None else newest.created_at,
        "chips": [(alias["name"], alias["targets"]) for alias in shown[:MOST_CHIPS]],
        "more": len(shown) - MOST_CHIPS,
    }


def _alias(alias: AliasObject) -> dict[str, Any]:
    return {"name": alias.alias, "targets": shares(alias), "follows": not alias.by_hand}


def _live(aliases: list[AliasObject]) -> list[AliasObject]:
    return [alias for alias in aliases if alias.alias == LIVE]
