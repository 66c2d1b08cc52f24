"""The pages of a tenant's API keys: the list, and one key's restrictions."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import RedirectResponse
from sqlalchemy.ext.asyncio import AsyncSession

from app.auth import SessionUser, TenantAdmin
from app.caller import Caller, KeyBudget, KeyLimits
from app.console import key_form
from app.console.adapters import may_write, newest_model, tenant_only
from app.console.examples import first_call
from app.console.forms import Form, submit
from app.console.render import render
from app.console.tables import PageNumber, Search, Sort, TableView
from app.deps import PlatformDep
from app.errors import AppError, InvalidRequest
from app.keys import changes, service
from app.keys.models import ApiKey
from app.keys.restrictions import access_of
from app.platform import Platform
from app.tenants import service as tenants

router = APIRouter(prefix="/console/keys", include_in_schema=False)

OVERLAPS = ((0, "at once"), (3600, "in an hour"), (86_400, "in a day"), (604_800, "in a week"))
KeyId = Annotated[str, Path(max_length=40)]


@dataclass(frozen=True, slots=True)
class CreatedKey:
    """A key just made: the one time its secret is shown. `call`: "" for one that calls nothing."""

    name: str
    secret: str
    call: str


@router.get("")
async def keys_page(
    request: Request,
    caller: SessionUser,
    platform: PlatformDep,
    q: Search = "",
    sort: Sort = "",
    page: PageNumber = 1,
) -> Response:
    tenant_only(caller)
    view = TableView("/console/keys", q, sort, page)
    return await _list(request, platform, caller, view=view)


@router.post("")
async def create_key(request: Request, caller: TenantAdmin, platform: PlatformDep) -> Response:
    """The answer is the page itself, with the secret on it: no address leads there again."""
    tenant_only(caller)

    async def create(session: AsyncSession, form: Form) -> service.NewKey:
        now = platform.clock.now()
        wanted = key_form.restrictions(form)
        return await service.create_key(
            session,
            secrets=platform.secrets,
            now=now,
            actor=caller,
            tenant=await tenants.find_tenant(session, caller.tenant_id),
            name=wanted["name"],
            adapters=wanted["adapters"],
            access=wanted["access"],
            networks=wanted["networks"],
            expires_at=key_form.expiry(form, now),
            limits=KeyLimits(**{name: wanted[name] for name in changes.LIMITS}),
            budget=KeyBudget(**{name: wanted.get(name) for name in changes.BUDGETS}),
            settings=platform.settings,
        )

    async def done(made: service.NewKey) -> Response:
        return await _list(request, platform, caller, created=await _shown(platform, caller, made))

    async def again(form: Form, error: AppError) -> Response:
        return await _list(request, platform, caller, form=form, error=key_form.labelled(error))

    return await submit(request, platform.db, create, done=done, again=again)


@router.get("/{key_id}")
async def key_page(
    key_id: KeyId, request: Request, caller: SessionUser, platform: PlatformDep
) -> Response:
    tenant_only(caller)
    return await _key_page(request, platform, caller, key_id)


@router.post("/{key_id}")
async def change_key(
    key_id: KeyId, request: Request, caller: TenantAdmin, platform: PlatformDep
) -> Response:
    """What the form shows; an expiry changes only where one is chosen."""
    tenant_only(caller)

    async def change(session: AsyncSession, form: Form) -> ApiKey:
        now = platform.clock.now()
        wanted = key_form.restrictions(form)
        if form.text("days"):
            wanted["expires_at"] = key_form.expiry(form, now)
        key = await service.find_key(session, key_id, tenant_id=caller.tenant_id, lock=True)
        for name in (*changes.LIMITS, *changes.BUDGETS):
            if name in wanted and wanted[name] == getattr(key, name):
                del wanted[name]  # what stays is not held against what the tenant has by now
        return await changes.update_key(
            session,
            key_id,
            changes=wanted,
            now=now,
            actor=caller,
            tenant_id=caller.tenant_id,
            settings=platform.settings,
        )

    async def done(_: ApiKey) -> Response:
        platform.forget_keys()
        return RedirectResponse(f"/console/keys/{key_id}", status_code=303)

    async def again(form: Form, error: AppError) -> Response:
        named = key_form.labelled(error)
        return await _key_page(request, platform, caller, key_id, form=form, error=named)

    find = _own(caller, key_id)
    return await submit(request, platform.db, change, done=done, again=again, find=find)


@router.post("/{key_id}/rotate")
async def rotate_key(
    key_id: KeyId, request: Request, caller: TenantAdmin, platform: PlatformDep
) -> Response:
    tenant_only(caller)

    async def rotate(session: AsyncSession, form: Form) -> service.NewKey:
        overlap_s = form.integer("overlap_s", platform.settings.key_rotation_overlap_s)
        if overlap_s not in (*dict(OVERLAPS), platform.settings.key_rotation_overlap_s):
            raise InvalidRequest("Choose one of the times in the list.", param="overlap_s")
        return await service.rotate_key(
            session,
            key_id,
            secrets=platform.secrets,
            now=platform.clock.now(),
            actor=caller,
            tenant_id=caller.tenant_id,
            overlap=timedelta(seconds=overlap_s),
        )

    async def done(made: service.NewKey) -> Response:
        platform.forget_keys()
        return await _list(request, platform, caller, created=await _shown(platform, caller, made))

    async def again(_: Form, error: AppError) -> Response:
        return await _list(request, platform, caller, error=error)

    find = _own(caller, key_id)
    return await submit(request, platform.db, rotate, done=done, again=again, find=find)


def _own(caller: Caller, key_id: str) -> Callable[[AsyncSession], Awaitable[object]]:
    """Finds the key among the caller's, before a form about it is looked at."""
    return lambda session: service.find_key(session, key_id, tenant_id=caller.tenant_id)


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


async def _list(
    request: Request,
    platform: Platform,
    caller: Caller,
    *,
    view: TableView | None = None,
    created: CreatedKey | None = None,
    form: Form | None = None,
    error: AppError | None = None,
) -> Response:
    view = view or TableView("/console/keys")
    async with platform.db.reading() as session:
        found = await service.key_table(session, view.wanted, tenant_id=caller.tenant_id)
    now = platform.clock.now()
    typed = {} if form is None else form.fields
    page = render(
        request,
        "keys.html",
        keys=[_row(row, now) for row, _ in found.rows],
        view=TableView(view.path, view.q, view.sort, view.page, total=found.total),
        created=created,
        error=error,
        may_write=may_write(caller),
        typed=typed,
        restricted=key_form.restricts(typed),
        **key_form.choices(caller),
    )
    page.headers["Cache-Control"] = "no-store"
    return page


async def _key_page(
    request: Request,
    platform: Platform,
    caller: Caller,
    key_id: str,
    *,
    form: Form | None = None,
    error: AppError | None = None,
) -> Response:
    async with platform.db.reading() as session:
        key = await service.find_key(session, key_id, tenant_id=caller.tenant_id)
    typed = key_form.typed_of(key) if form is None else form.fields
    return render(
        request,
        "key.html",
        key=_row(key, platform.clock.now()),
        error=error,
        may_write=may_write(caller),
        overlaps=OVERLAPS,
        typed=typed,
        restricted=key_form.restricts(typed),
        **key_form.choices(caller),
    )


async def _shown(platform: Platform, caller: Caller, made: service.NewKey) -> CreatedKey:
    """With a call to the key's first adapter, else to the tenant's newest, else to the base."""
    scopes, secret, call = made.row.scopes, made.secret.text, ""
    if access_of(scopes) != "read":
        own = scopes.get("adapters")
        model = own[0] if own else await newest_model(platform, caller)
        call = first_call(platform.settings.public_url, model, secret)
    return CreatedKey(made.row.name, secret, call)


def _row(key: ApiKey, now: datetime) -> dict[str, Any]:
    state = service.state(key, now)
    return {
        "id": key.id,
        "name": key.name or "(no name)",
        "public_id": key.public_id,
        "last4": key.last4,
        "adapters": key.scopes.get("adapters"),
        "access": dict(key_form.ACCESS)[access_of(key.scopes)],
        "networks": key.scopes.get("networks"),
        "limits": key_form.limits_of(key),
        "budget": key_form.budget_of(key),
        "created_at": key.created_at,
        "last_used_at": key.last_used_at,
        "state": state,
        "rotated": key.revoke_at is not None,
        "until": (key.revoke_at or key.expires_at) if state == "active" else None,
    }
