"""Pages about adapters: list, upload, versions with their validation report."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse

from app.adapters import alias_service, erasure, service, uploads
from app.adapters.deps import GateDep, ResourcesDep
from app.adapters.names import LIVE
from app.adapters.schemas import AdapterObject, CheckObject, VersionObject
from app.auth import SessionUser, TenantAdmin
from app.caller import Caller
from app.console.examples import curl_call, python_call
from app.console.figures import figure, moment, size
from app.console.forms import read_form
from app.console.render import render
from app.deps import PlatformDep
from app.errors import AppError, Forbidden, InvalidRequest
from app.platform import Platform

router = APIRouter(prefix="/console/adapters", include_in_schema=False)

PAGE = 50
SETTLED = frozenset({"ready", "rejected", "failed", "archived", "erased"})
GROUPS = {
    "container": "Files",
    "config": "Configuration",
    "coverage": "Coverage",
    "numbers": "Numbers",
    "behaviour": "Behaviour",
}
PASSED = {
    "container": "Both files are whole and hold what their headers say.",
    "config": "The configuration asks for nothing that cannot be served.",
    "coverage": "Every tensor has its place on the base model.",
    "numbers": "All weights are finite and of ordinary size.",
    "behaviour": "The engine ran it on probe prompts without a fault.",
}
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
    resources: ResourcesDep,
    platform: PlatformDep,
    after: Annotated[str | None, Query(max_length=40)] = None,
) -> Response:
    tenant_only(caller)
    async with platform.db.reading() as session:
        listed = await service.list_adapters(session, caller, after=after, limit=PAGE)
    return render(
        request,
        "adapters.html",
        adapters=[_row(adapter) for adapter in listed.data],
        next_page=f"/console/adapters?after={listed.last_id}" if listed.has_more else None,
        may_write=may_write(caller),
        base_model=base_model_name(platform),
    )


def base_model_name(platform: Platform) -> str:
    """What the engines serve, or the configured file before one was heard of."""
    for engine in platform.engines.all if platform.engines is not None else ():
        if engine.description is not None:
            return str(engine.description.name)
    return platform.settings.base_model.stem


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
    tenant_only(caller)
    length = request.headers.get("content-length", "")
    by_script = "application/json" in request.headers.get("accept", "")
    try:
        received = await uploads.receive(
            resources,
            gate,
            caller,
            request.stream(),
            content_type=request.headers.get("content-type", ""),
            content_length=int(length) if length.isdigit() else None,
        )
    except AppError as error:
        if by_script:
            return JSONResponse(error.body(), status_code=error.status, headers=error.headers())
        return _upload_form(request, platform, error=error)
    version = received.version
    location = f"/console/adapters/{version.adapter}/versions/{version.version}"
    if by_script:
        return JSONResponse({"location": location})
    return RedirectResponse(location, status_code=303)


@router.get("/{name}")
async def adapter_page(
    name: Name, request: Request, caller: SessionUser, platform: PlatformDep
) -> Response:
    tenant_only(caller)
    async with platform.db.reading() as session:
        adapter = await service.get_adapter(session, caller, name)
    pointing: dict[int, list[str]] = {}
    for alias in adapter.aliases:
        for target in alias.targets:
            label = alias.alias if target.weight == 100 else f"{alias.alias} {target.weight} %"
            pointing.setdefault(target.version, []).append(label)
    versions = sorted(adapter.versions, key=lambda version: -version.version)
    return render(
        request,
        "adapter.html",
        adapter={"name": adapter.name, "id": adapter.id, "live": _live(adapter)},
        versions=[_version(version, pointing.get(version.version, [])) for version in versions],
        may_write=may_write(caller),
    )


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


@router.post("/{name}/versions/{number}/promote")
async def promote(
    name: Name, number: Number, caller: TenantAdmin, resources: ResourcesDep
) -> Response:
    tenant_only(caller)
    async with resources.db.transaction() as session:
        await alias_service.set_alias(
            session, caller, name, LIVE, [(number, 100)], now=resources.clock.now()
        )
    return RedirectResponse(f"/console/adapters/{name}", status_code=303)


@router.get("/{name}/versions/{number}")
async def version_page(
    name: Name, number: Number, request: Request, caller: SessionUser, platform: PlatformDep
) -> Response:
    return await _version_page(request, platform, caller, name, number, "version.html")


@router.get("/{name}/versions/{number}/report")
async def report_fragment(
    name: Name, number: Number, request: Request, caller: SessionUser, platform: PlatformDep
) -> Response:
    """The report alone, which the page asks for each second until there is a verdict."""
    return await _version_page(request, platform, caller, name, number, "_report.html")


async def _version_page(
    request: Request,
    platform: Platform,
    caller: Caller,
    name: str,
    number: int,
    template: str,
) -> Response:
    tenant_only(caller)
    async with platform.db.reading() as session:
        version = await service.get_version(session, caller, name, number)
    checks = version.report.checks if version.report is not None else []
    model = f"{version.adapter}@v{version.version}"
    return render(
        request,
        template,
        adapter={"name": version.adapter},
        version=_version(version, []),
        checks=[_check(check) for check in checks],
        group_count=len(GROUPS),
        progress_text=_progress(version),
        curl=curl_call(platform.settings.public_url, model),
        python=python_call(platform.settings.public_url, model),
    )


def _upload_form(
    request: Request, platform: Platform, *, name: str = "", error: AppError | None = None
) -> Response:
    limit = platform.settings.max_adapter_bytes
    return render(
        request,
        "upload.html",
        status=200 if error is None else error.status,
        name=name,
        max_bytes=limit,
        max_size=size(limit),
        error="" if error is None else error.message,
        error_field="" if error is None else error.param,
    )


def _row(adapter: AdapterObject) -> dict[str, Any]:
    newest = max(adapter.versions, key=lambda version: version.version)
    shown = _version(newest, [])
    return shown | {"name": adapter.name, "newest": newest.version, "live": _live(adapter)}


def _live(adapter: AdapterObject) -> str:
    """`3`, or `3 and 4` while a canary runs; empty before anything is ready."""
    targets = [alias.targets for alias in adapter.aliases if alias.alias == LIVE]
    return " and ".join(str(target.version) for target in targets[0]) if targets else ""


def _version(version: VersionObject, aliases: list[str]) -> dict[str, Any]:
    return {
        "number": version.version,
        "state": version.state,
        "settled": version.state in SETTLED,
        "reason": version.reason,
        "rank": version.rank,
        "targets": version.targets or [],
        "size": size(version.config_bytes + version.weights_bytes),
        "digest": version.digest,
        "created_at": moment(version.created_at),
        "aliases": aliases,
    }


def _check(check: CheckObject) -> dict[str, Any]:
    summary = PASSED.get(check.group, "") if check.status == "pass" else ""
    if check.status == "skipped":
        summary = "Not run, because an earlier check failed."
    return {
        "title": GROUPS.get(check.group, check.group),
        "outcome": check.status,
        "summary": summary,
        "findings": check.findings,
        "figures": [
            (name.replace("_", " "), figure(value)) for name, value in check.figures.items()
        ],
    }


def _progress(version: VersionObject) -> str:
    if version.report is not None and version.report.message:
        return version.report.message
    if version.state == "uploaded":
        return "Waiting for a worker."
    done = len(version.report.checks) if version.report is not None else 0
    return f"{done} of {len(GROUPS)} checks are done."
