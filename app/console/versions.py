"""One version: its validation report, filled in while the checks run, and calls to copy."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse
from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters import alias_service, erasure, service
from app.adapters.alias_schemas import AliasObject
from app.adapters.deps import ResourcesDep
from app.adapters.names import LIVE
from app.auth import SessionUser, TenantAdmin
from app.caller import Caller
from app.console.adapters import Name, Number, may_write, tenant_only
from app.console.examples import examples
from app.console.render import render
from app.console.version_views import GROUPS, progress, shares, shown_check, shown_version
from app.deps import PlatformDep
from app.errors import NotFound
from app.platform import Platform

router = APIRouter(prefix="/console/adapters/{name}/versions", include_in_schema=False)


@router.get("/{number}")
async def version_page(
    name: Name, number: Number, request: Request, caller: SessionUser, platform: PlatformDep
) -> Response:
    return await _page(request, platform, caller, name, number, "version.html")


@router.get("/{number}/report")
async def report_fragment(
    name: Name,
    number: Number,
    request: Request,
    caller: SessionUser,
    platform: PlatformDep,
    seen: Annotated[str, Query(max_length=40)] = "",
) -> Response:
    """The report alone, which the page asks for each second until there is a verdict.

    204 while it is what the page has `seen`: a screen reader says only what is new.
    """
    return await _page(request, platform, caller, name, number, "_report.html", seen)


@router.post("/{number}/promote")
async def promote(
    name: Name, number: Number, caller: TenantAdmin, resources: ResourcesDep
) -> Response:
    tenant_only(caller)
    async with resources.db.transaction() as session:
        await alias_service.set_alias(
            session, caller, name, LIVE, [(number, 100)], now=resources.clock.now()
        )
    return RedirectResponse(f"/console/adapters/{name}", status_code=303)


@router.post("/{number}/erase")
async def erase(
    name: Name, number: Number, caller: TenantAdmin, resources: ResourcesDep
) -> Response:
    tenant_only(caller)
    await erasure.erase(resources, caller, name, number)
    return RedirectResponse(f"/console/adapters/{name}", status_code=303)


async def _page(
    request: Request,
    platform: Platform,
    caller: Caller,
    name: str,
    number: int,
    template: str,
    seen: str = "",
) -> Response:
    tenant_only(caller)
    async with platform.db.reading() as session:
        version = await service.get_version(session, caller, name, number)
        live = await _live(session, caller, name) if version.state == "ready" else None
    checks = version.report.checks if version.report is not None else []
    stage = f"{version.state}-{len(checks)}"
    if seen == stage:
        return Response(status_code=204)
    pinned = f"{version.adapter}@v{version.version}"
    reached = [] if live is None else [target.version for target in live.targets]
    model = version.adapter if version.version in reached else pinned
    return render(
        request,
        template,
        adapter={"name": version.adapter},
        version=shown_version(version, []),
        checks=[shown_check(check) for check in checks],
        group_count=len(GROUPS),
        stage=stage,
        progress_text=progress(version),
        model=model,
        pinned=pinned,
        live="" if live is None else shares(live),
        examples=examples(platform.settings.public_url, model),
        may_write=may_write(caller),
    )


async def _live(session: AsyncSession, caller: Caller, name: str) -> AliasObject | None:
    """What callers of the plain name reach; None while no version was ready."""
    try:
        return await alias_service.get_alias(session, caller, name, LIVE)
    except NotFound:
        return None
