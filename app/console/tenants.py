"""The operator's pages of tenants: the list, one tenant with all that is its, and its end."""

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, cast

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters import repository as adapter_rows
from app.adapters.deps import ResourcesDep
from app.console.figures import size
from app.console.forms import Form, read_form
from app.console.operator import Operator
from app.console.render import render
from app.console.token_chart import tokens_chart
from app.deps import PlatformDep
from app.error_handlers import from_validation
from app.errors import AppError, InvalidRequest
from app.keys import service as keys
from app.platform import Platform
from app.settings import Settings
from app.tables import TableQuery
from app.tenants import deletion, service
from app.tenants.models import Tenant
from app.tenants.routes import AT_ONCE_MS
from app.tenants.schemas import TenantLimitsIn
from app.usage import repository as usage_rows
from app.usage.report import report
from app.usage.service import month_standing
from app.users import service as users
from app.users.links import link_url
from app.users.service import UserRole
from app.webhooks import repository as webhook_rows

router = APIRouter(prefix="/console/tenants", include_in_schema=False)

PAGE = 25
WHOLE_NUMBER = re.compile(r"-?[0-9]+")
MOST_SHOWN = 100
ROLES = {"tenant_admin": "admin", "tenant_viewer": "viewer"}
WHOLE = frozenset(
    {
        "requests_per_minute",
        "tokens_per_minute",
        "max_concurrent",
        "monthly_tokens",
        "max_adapters",
        "max_stored_bytes",
        "max_resident_bytes",
        "reserved_resident_bytes",
        "max_rank",
        "max_tokens",
    }
)
QUOTAS = (
    ("requests_per_minute", "Requests per minute"),
    ("tokens_per_minute", "Tokens per minute"),
    ("max_concurrent", "Requests at once"),
    ("monthly_tokens", "Tokens per month (UTC)"),
    ("max_tokens", "Longest answer, tokens"),
    ("max_adapters", "Adapters"),
    ("max_stored_bytes", "Stored adapters, bytes"),
    ("max_resident_bytes", "Adapters in an engine, bytes"),
    ("reserved_resident_bytes", "Kept free in an engine for this tenant, bytes"),
    ("max_rank", "Highest rank"),
)
BUDGETS = (
    ("ttft_ms", "Time to first token, ms"),
    ("tpot_ms", "Time per output token, ms"),
    ("budget_percentile", "Share of requests inside the latency budget, 0 to 1"),
    ("weight", "Weight among tenants"),
)
TenantId = Annotated[str, Path(max_length=40)]
Words = Annotated[str, Query(alias="q", max_length=100)]


@dataclass(frozen=True, slots=True)
class Invited:
    email: str
    link: str


# --------------------------------------------------------------------------- the list


@router.get("")
async def tenants_page(
    request: Request,
    caller: Operator,
    platform: PlatformDep,
    words: Words = "",
    page: Annotated[int, Query(ge=1, le=10_000)] = 1,
) -> Response:
    return await _list(request, platform, words=words.strip(), page=page)


@router.post("")
async def create_tenant(request: Request, caller: Operator, platform: PlatformDep) -> Response:
    form = await read_form(request)
    try:
        async with platform.db.transaction() as session:
            tenant = await service.create_tenant(
                session, name=form.text("name"), now=platform.clock.now(), actor=caller
            )
    except AppError as error:
        return await _list(request, platform, form=form, error=error)
    return RedirectResponse(f"/console/tenants/{tenant.id}", status_code=303)


async def _list(
    request: Request,
    platform: Platform,
    *,
    words: str = "",
    page: int = 1,
    form: Form | None = None,
    error: AppError | None = None,
) -> Response:
    wanted = TableQuery(search=words, limit=PAGE, offset=(page - 1) * PAGE)
    async with platform.db.reading() as session:
        table = await service.tenant_table(session, wanted)
    return render(
        request,
        "tenants.html",
        tenants=[(tenant, used) for tenant, used in table.rows],
        total=table.total,
        words=words,
        page=page,
        pages=max(1, math.ceil(table.total / PAGE)),
        form_name="" if form is None else form.fields.get("name", ""),
        error=error,
    )


# --------------------------------------------------------------------------- one tenant


@router.get("/{tenant_id}")
async def tenant_page(
    tenant_id: TenantId, request: Request, caller: Operator, platform: PlatformDep
) -> Response:
    return await _page(request, platform, tenant_id)


@router.post("/{tenant_id}/limits")
async def set_limits(
    tenant_id: TenantId, request: Request, caller: Operator, platform: PlatformDep
) -> Response:
    """An empty field is the platform's default. Only what differs is written and audited."""
    form = await read_form(request)
    try:
        wanted = _limits(form)
        async with platform.db.transaction() as session:
            tenant = await service.find_tenant(session, tenant_id)
            changes = {
                name: value
                for name, value in wanted.items()
                if value != getattr(tenant, name) and not (name == "weight" and value is None)
            }
            if changes:
                await service.update_tenant(
                    session, tenant_id, changes=changes, now=platform.clock.now(), actor=caller
                )
    except AppError as error:
        return await _page(request, platform, tenant_id, form=form, error=error)
    platform.forget_keys()
    return RedirectResponse(f"/console/tenants/{tenant_id}?saved=1", status_code=303)


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
                tenant=service.require_kept(await service.find_tenant(session, tenant_id)),
                secrets=platform.secrets,
                passwords=platform.passwords,
                settings=platform.settings,
                now=platform.clock.now(),
                actor=caller,
            )
    except AppError as error:
        return await _page(request, platform, tenant_id, form=form, error=error)
    invited = Invited(invitation.user.email, link_url(platform.settings, invitation))
    return await _page(request, platform, tenant_id, invited=invited)


@router.post("/{tenant_id}/keys/{key_id}/revoke")
async def revoke_key(
    tenant_id: TenantId,
    key_id: Annotated[str, Path(max_length=40)],
    caller: Operator,
    platform: PlatformDep,
) -> Response:
    async with platform.db.transaction() as session:
        await keys.revoke_key(
            session, key_id, now=platform.clock.now(), actor=caller, tenant_id=tenant_id
        )
    platform.forget_keys()
    return RedirectResponse(f"/console/tenants/{tenant_id}#keys", status_code=303)


async def _page(
    request: Request,
    platform: Platform,
    tenant_id: str,
    *,
    invited: Invited | None = None,
    form: Form | None = None,
    error: AppError | None = None,
) -> Response:
    now = platform.clock.now()
    async with platform.db.reading() as session:
        tenant = await service.find_tenant(session, tenant_id)
        if tenant.deleted_at is not None:
            receipt = await deletion.read_receipt(session, tenant_id)
            status = 200 if error is None else error.status
            return render(
                request, "tenant_deleted.html", status=status, tenant=tenant, receipt=receipt
            )
        people = await users.list_users(session, tenant_id=tenant_id, limit=MOST_SHOWN)
        its_keys = await keys.list_keys(session, tenant_id=tenant_id, limit=MOST_SHOWN)
        adapters = await adapter_rows.count_adapters(session, tenant_id)
        stored = await adapter_rows.stored_bytes(session, tenant_id)
        used = await report(session, tenant_id, now=now, bucket="day")
        billed, reserved = await month_standing(session, tenant_id, now)
    page = render(
        request,
        "tenant.html",
        tenant=tenant,
        people=people,
        keys=[(key, keys.state(key, now)) for key in its_keys],
        adapters=adapters,
        stored=size(stored),
        chart=tokens_chart(used.data, used.start, now, "day"),
        requests=sum(row.requests for row in used.data),
        failed=sum(row.failed for row in used.data),
        tokens=sum(row.total_tokens for row in used.data),
        billed=billed,
        reserved=reserved,
        quotas=_fields(QUOTAS, tenant, platform.settings, form),
        budgets=_fields(BUDGETS, tenant, platform.settings, form),
        roles=ROLES,
        invited=invited,
        form_email="" if form is None else form.fields.get("email", ""),
        saved=error is None and request.query_params.get("saved") == "1",
        error=error,
    )
    page.headers["Cache-Control"] = "no-store"
    return page


def _fields(
    names: tuple[tuple[str, str], ...], tenant: Tenant, settings: Settings, form: Form | None
) -> list[dict[str, Any]]:
    """One input for each limit: what was typed, else the tenant's own; the default beside it."""
    default = service.effective_limits(Tenant(weight=1.0), settings)
    fields = []
    for name, title in names:
        own = getattr(tenant, name)
        typed = None if form is None else form.fields.get(name)
        fallback = getattr(default, name)
        in_bytes = name.endswith("_bytes")
        told = "none"
        if fallback is not None:
            told = size(fallback) if in_bytes else f"{fallback:,.15g}"
        fields.append(
            {
                "name": name,
                "title": title,
                "value": typed if typed is not None else "" if own is None else f"{own:.15g}",
                "whole": name in WHOLE,
                "default": told,
                "shown": size(own) if in_bytes and own is not None else "",
            }
        )
    return fields


def _limits(form: Form) -> dict[str, Any]:
    """The form's limits, checked as the API checks them. Raises InvalidRequest for the first."""
    given: dict[str, Any] = {}
    for name, title in (*QUOTAS, *BUDGETS):
        text = form.text(name, most=30)
        if not text:
            given[name] = None
        elif name not in WHOLE:
            given[name] = form.number(name, 0.0)
        elif WHOLE_NUMBER.fullmatch(text):
            given[name] = int(text)
        else:
            raise InvalidRequest(
                f"{title}: {text!r} is no whole number; leave the field empty for the platform's "
                "default.",
                param=name,
            )
    try:
        return TenantLimitsIn.model_validate(given).model_dump()
    except ValidationError as error:
        raise from_validation(error.errors()) from None


# --------------------------------------------------------------------------- suspending, deleting


@router.get("/{tenant_id}/suspend")
async def suspend_page(
    tenant_id: TenantId, request: Request, caller: Operator, platform: PlatformDep
) -> Response:
    return await _confirm(request, platform, tenant_id, "suspend")


@router.post("/{tenant_id}/suspend")
async def suspend(tenant_id: TenantId, caller: Operator, platform: PlatformDep) -> Response:
    return await _set_status(platform, caller, tenant_id, active=False)


@router.post("/{tenant_id}/resume")
async def resume(tenant_id: TenantId, caller: Operator, platform: PlatformDep) -> Response:
    return await _set_status(platform, caller, tenant_id, active=True)


@router.get("/{tenant_id}/delete")
async def delete_page(
    tenant_id: TenantId, request: Request, caller: Operator, platform: PlatformDep
) -> Response:
    return await _confirm(request, platform, tenant_id, "delete")


@router.post("/{tenant_id}/delete")
async def delete(
    tenant_id: TenantId,
    request: Request,
    caller: Operator,
    platform: PlatformDep,
    resources: ResourcesDep,
) -> Response:
    form = await read_form(request)
    try:
        async with platform.db.transaction() as session:
            await deletion.begin(
                session,
                tenant_id,
                confirm=form.text("confirm"),
                now=platform.clock.now(),
                actor=caller,
            )
    except InvalidRequest as error:
        return await _confirm(request, platform, tenant_id, "delete", error=error)
    platform.forget_tenant(tenant_id)
    await deletion.carry_on(resources, tenant_id, most_ms=AT_ONCE_MS)
    return RedirectResponse(f"/console/tenants/{tenant_id}", status_code=303)


async def _set_status(
    platform: Platform, caller: Operator, tenant_id: str, *, active: bool
) -> Response:
    async with platform.db.transaction() as session:
        await service.set_status(
            session, tenant_id, active=active, now=platform.clock.now(), actor=caller
        )
    platform.forget_keys()
    return RedirectResponse(f"/console/tenants/{tenant_id}", status_code=303)


async def _confirm(
    request: Request,
    platform: Platform,
    tenant_id: str,
    action: str,
    *,
    error: AppError | None = None,
) -> Response:
    """What suspending or deleting does to this tenant, before it is done."""
    async with platform.db.reading() as session:
        tenant = service.require_kept(await service.find_tenant(session, tenant_id))
        lost = await _what_there_is(session, platform, tenant_id)
    return render(
        request,
        "tenant_confirm.html",
        tenant=tenant,
        action=action,
        lost=lost,
        kept=deletion.KEPT,
        error=error,
    )


async def _what_there_is(
    session: AsyncSession, platform: Platform, tenant_id: str
) -> dict[str, Any]:
    now = platform.clock.now()
    its_keys = await keys.list_keys(session, tenant_id=tenant_id, limit=1000)
    people = await users.list_users(session, tenant_id=tenant_id, limit=1000)
    return {
        "keys": sum(keys.state(key, now) == "active" for key in its_keys),
        "users": len(people),
        "adapters": await adapter_rows.count_adapters(session, tenant_id),
        "stored": size(await adapter_rows.stored_bytes(session, tenant_id)),
        "webhooks": len(await webhook_rows.endpoints_of(session, tenant_id)),
        "calls": await usage_rows.count_open(session, tenant_id),
    }
