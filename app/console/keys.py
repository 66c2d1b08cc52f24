"""The page of a tenant's API keys."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import RedirectResponse

from app.adapters.names import NAME
from app.auth import SessionUser, TenantAdmin
from app.caller import Caller
from app.console.adapters import may_write, tenant_only
from app.console.forms import Form, read_form
from app.console.render import render
from app.deps import PlatformDep
from app.errors import AppError, InvalidRequest
from app.keys import service
from app.keys.models import ApiKey
from app.platform import Platform
from app.tenants import service as tenants

router = APIRouter(prefix="/console/keys", include_in_schema=False)

LIFETIMES = ((0, "never"), (7, "7 days"), (30, "30 days"), (90, "90 days"), (365, "a year"))
MOST_SHOWN = 200
KeyId = Annotated[str, Path(max_length=40)]


@dataclass(frozen=True, slots=True)
class CreatedKey:
    """A key just made: the one time its secret is shown."""

    name: str
    secret: str


@router.get("")
async def keys_page(request: Request, caller: SessionUser, platform: PlatformDep) -> Response:
    tenant_only(caller)
    return await _page(request, platform, caller)


@router.post("")
async def create_key(request: Request, caller: TenantAdmin, platform: PlatformDep) -> Response:
    """The answer is the page itself, with the secret on it: no address leads there again."""
    tenant_only(caller)
    form = await read_form(request)
    now = platform.clock.now()
    try:
        days = form.integer("days", 0)
        if days not in dict(LIFETIMES):
            raise InvalidRequest("Choose one of the lifetimes in the list.", param="days")
        async with platform.db.transaction() as session:
            made = await service.create_key(
                session,
                secrets=platform.secrets,
                now=now,
                actor=caller,
                tenant=await tenants.find_tenant(session, caller.tenant_id),
                name=form.text("name", most=80),
                adapters=_scope(form),
                expires_at=now + timedelta(days=days) if days else None,
            )
    except AppError as error:
        return await _page(request, platform, caller, form=form, error=error)
    return await _page(request, platform, caller, created=_shown(made))


@router.post("/{key_id}/rotate")
async def rotate_key(
    key_id: KeyId, request: Request, caller: TenantAdmin, platform: PlatformDep
) -> Response:
    tenant_only(caller)
    try:
        async with platform.db.transaction() as session:
            made = await service.rotate_key(
                session,
                key_id,
                secrets=platform.secrets,
                now=platform.clock.now(),
                actor=caller,
                tenant_id=caller.tenant_id,
                overlap=timedelta(seconds=platform.settings.key_rotation_overlap_s),
            )
    except AppError as error:
        return await _page(request, platform, caller, error=error)
    platform.forget_keys()
    return await _page(request, platform, caller, created=_shown(made))


@router.post("/{key_id}/revoke")
async def revoke_key(key_id: KeyId, caller: TenantAdmin, platform: PlatformDep) -> Response:
    tenant_only(caller)
    async with platform.db.transaction() as session:
        await service.revoke_key(
            session,
            key_id,
            now=platform.clock.now(),
            actor=caller,
            tenant_id=caller.tenant_id,
        )
    platform.forget_keys()
    return RedirectResponse("/console/keys", status_code=303)


async def _page(
    request: Request,
    platform: Platform,
    caller: Caller,
    *,
    created: CreatedKey | None = None,
    form: Form | None = None,
    error: AppError | None = None,
) -> Response:
    async with platform.db.reading() as session:
        rows = await service.list_keys(session, tenant_id=caller.tenant_id, limit=MOST_SHOWN)
    now = platform.clock.now()
    typed = form.fields if form is not None else {}
    page = render(
        request,
        "keys.html",
        status=200 if error is None else error.status,
        keys=[_row(row, service.state(row, now)) for row in rows],
        created=created,
        error="" if error is None else error.message,
        may_write=may_write(caller),
        expiries=LIFETIMES,
        form_name=typed.get("name", ""),
        form_adapters=typed.get("adapters", ""),
        form_days=typed.get("days", "0"),
    )
    page.headers["Cache-Control"] = "no-store"
    return page


def _scope(form: Form) -> list[str] | None:
    names = [name.strip() for name in form.text("adapters", most=5000).split(",") if name.strip()]
    for name in names:
        if NAME.fullmatch(name) is None:
            raise InvalidRequest(
                f"{name[:64]!r} is no adapter's name; separate the names by commas.",
                param="adapters",
            )
    return names or None


def _shown(made: service.NewKey) -> CreatedKey:
    return CreatedKey(made.row.name, made.secret.text)


def _row(key: ApiKey, state: str) -> dict[str, Any]:
    return {
        "id": key.id,
        "name": key.name,
        "public_id": key.public_id,
        "last4": key.last4,
        "scope": key.scopes.get("adapters"),
        "created_at": key.created_at,
        "last_used_at": key.last_used_at,
        "state": state,
        "until": (key.revoke_at or key.expires_at) if state == "active" else None,
    }
