"""The operator's page: tenants, and the invitations of their people."""

from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import APIRouter, Depends, Path, Request, Response
from fastapi.responses import RedirectResponse

from app.auth import SessionUser
from app.caller import Caller
from app.console.forms import Form, read_form
from app.console.render import render
from app.deps import PlatformDep
from app.errors import AppError, Forbidden, InvalidRequest
from app.platform import Platform
from app.tenants import service
from app.users import service as users
from app.users.links import link_url
from app.users.service import UserRole

router = APIRouter(prefix="/console/tenants", include_in_schema=False)

MOST_SHOWN = 500
ROLES = {"tenant_admin": "admin", "tenant_viewer": "viewer"}
TenantId = Annotated[str, Path(max_length=40)]


@dataclass(frozen=True, slots=True)
class Invited:
    email: str
    link: str


async def _operator(caller: SessionUser) -> Caller:
    if caller.role != "operator":
        raise Forbidden("Only operators see the tenants.", code="operator_only")
    return caller


Operator = Annotated[Caller, Depends(_operator)]


@router.get("")
async def tenants_page(request: Request, caller: Operator, platform: PlatformDep) -> Response:
    return await _page(request, platform)


@router.post("")
async def create_tenant(request: Request, caller: Operator, platform: PlatformDep) -> Response:
    form = await read_form(request)
    try:
        async with platform.db.transaction() as session:
            await service.create_tenant(
                session, name=form.text("name"), now=platform.clock.now(), actor=caller
            )
    except AppError as error:
        return await _page(request, platform, form=form, error=error)
    return RedirectResponse("/console/tenants", status_code=303)


@router.post("/{tenant_id}/invite")
async def invite(
    tenant_id: TenantId, request: Request, caller: Operator, platform: PlatformDep
) -> Response:
    """The answer is the page with the link on it; loramux sends no mail."""
    form = await read_form(request)
    try:
        role = form.text("role")
        if role not in ROLES:
            raise InvalidRequest("Choose admin or viewer.", param="role")
        async with platform.db.transaction() as session:
            invitation = await users.invite(
                session,
                email=form.text("email"),
                role=cast(UserRole, role),
                tenant=await service.find_tenant(session, tenant_id),
                secrets=platform.secrets,
                passwords=platform.passwords,
                settings=platform.settings,
                now=platform.clock.now(),
                actor=caller,
            )
    except AppError as error:
        return await _page(request, platform, error=error)
    invited = Invited(invitation.user.email, link_url(platform.settings, invitation))
    return await _page(request, platform, invited=invited)


@router.post("/{tenant_id}/{action}")
async def set_status(
    tenant_id: TenantId, action: str, caller: Operator, platform: PlatformDep
) -> Response:
    if action not in ("suspend", "resume"):
        raise InvalidRequest("A tenant can be suspended or resumed.")
    async with platform.db.transaction() as session:
        await service.set_status(
            session,
            tenant_id,
            active=action == "resume",
            now=platform.clock.now(),
            actor=caller,
        )
    platform.forget_keys()
    return RedirectResponse("/console/tenants", status_code=303)


async def _page(
    request: Request,
    platform: Platform,
    *,
    invited: Invited | None = None,
    form: Form | None = None,
    error: AppError | None = None,
) -> Response:
    async with platform.db.reading() as session:
        rows = await service.list_tenants(session, limit=MOST_SHOWN)
    page = render(
        request,
        "tenants.html",
        status=200 if error is None else error.status,
        tenants=rows,
        invited=invited,
        roles=ROLES,
        form_name="" if form is None else form.fields.get("name", ""),
        error="" if error is None else error.message,
    )
    page.headers["Cache-Control"] = "no-store"
    return page
