"""The pages of a tenant's webhooks: the list, and one with its deliveries."""

from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Annotated, Any, TypeVar, get_args

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import BaseModel, ValidationError
from sqlalchemy.ext.asyncio import AsyncSession

from app.adapters.deps import ResourcesDep
from app.auth import SessionUser, TenantAdmin
from app.caller import Caller
from app.console.adapters import may_write, tenant_only
from app.console.figures import moment
from app.console.forms import Form, Work, read_form, submit
from app.console.render import render
from app.deps import PlatformDep
from app.errors import AppError, InvalidRequest
from app.platform import Platform
from app.webhooks import service
from app.webhooks.deps import SenderDep
from app.webhooks.models import WebhookDelivery, WebhookEndpoint
from app.webhooks.outbox import EventType, deliver_soon
from app.webhooks.schemas import DeliveryState, WebhookChange, WebhookIn, delivery_object

router = APIRouter(prefix="/console/webhooks", include_in_schema=False)

EVENTS: dict[str, str] = {
    "version.ready": "a version is ready",
    "version.rejected": "a version was rejected",
    "version.failed": "a validation could not be finished",
    "quota.threshold": "a quota is nearly used up",
    "limits.decided": "a request for another limit was answered",
}
assert set(EVENTS) == set(get_args(EventType)), "say what each event means"
OVERLAPS = ((0, "at once"), (3600, "in an hour"), (86_400, "in a day"), (604_800, "in a week"))
DISABLED = {
    "by hand": "somebody of your tenant disabled it.",
    "by an operator": "whoever runs loramux disabled it; ask them why.",
    "gone": "its receiver answered 410 Gone. Enable it once the address takes messages again.",
    "failing": "it took nothing for days. Enable it once the address takes messages again.",
}
PAGE = 20
Model = TypeVar("Model", bound=BaseModel)
T = TypeVar("T")
WebhookId = Annotated[str, Path(max_length=64)]
State = Annotated[DeliveryState | None, Query()]
After = Annotated[str | None, Query(max_length=40, pattern=r"^[a-z]{3}_[0-9a-z]{1,36}$")]


@router.get("")
async def webhooks_page(request: Request, caller: SessionUser, platform: PlatformDep) -> Response:
    tenant_only(caller)
    return await _list(request, platform, caller)


@router.post("")
async def create(
    request: Request, caller: TenantAdmin, platform: PlatformDep, sender: SenderDep
) -> Response:
    """The answer is the webhook's page with the secret on it: no address leads there again."""
    tenant_only(caller)
    form = await read_form(request)
    try:
        wanted = _checked(WebhookIn, _fields(form))
        url = await sender.check(wanted.url)  # which asks the network: in no transaction
        async with platform.db.transaction() as session:
            row, secret = await service.create(
                session,
                caller,
                wanted,
                url,
                secrets=platform.secrets,
                settings=platform.settings,
                now=platform.clock.now(),
            )
    except AppError as error:
        return await _list(request, platform, caller, form=form, error=error)
    return await _page(request, platform, caller, row.id, secret=secret)


@router.get("/{webhook_id}")
async def webhook_page(
    webhook_id: WebhookId,
    request: Request,
    caller: SessionUser,
    platform: PlatformDep,
    state: State = None,
    after: After = None,
) -> Response:
    tenant_only(caller)
    return await _page(request, platform, caller, webhook_id, state=state, after=after)


@router.post("/{webhook_id}")
async def change(
    webhook_id: WebhookId,
    request: Request,
    caller: TenantAdmin,
    platform: PlatformDep,
    sender: SenderDep,
) -> Response:
    tenant_only(caller)
    form = await read_form(request)
    async with platform.db.reading() as session:
        await service.find(session, caller, webhook_id)
    try:
        wanted = _checked(WebhookChange, _fields(form))
        url = await sender.check(wanted.url or "")
        async with platform.db.transaction() as session:
            await service.change(session, caller, webhook_id, wanted, url, now=platform.clock.now())
    except AppError as error:
        return await _page(request, platform, caller, webhook_id, form=form, error=error)
    return _back(webhook_id)


@router.post("/{webhook_id}/test")
async def send_test(
    webhook_id: WebhookId,
    request: Request,
    caller: TenantAdmin,
    platform: PlatformDep,
    resources: ResourcesDep,
) -> Response:
    async def work(session: AsyncSession, _: Form) -> object:
        return await service.send_test(
            session,
            caller,
            webhook_id,
            settings=platform.settings,
            now=platform.clock.now(),
        )

    return await _sent(request, platform, caller, webhook_id, resources, work)


@router.post("/{webhook_id}/deliveries/{delivery_id}/resend")
async def resend(
    webhook_id: WebhookId,
    delivery_id: WebhookId,
    request: Request,
    caller: TenantAdmin,
    platform: PlatformDep,
    resources: ResourcesDep,
) -> Response:
    async def work(session: AsyncSession, _: Form) -> object:
        return await service.resend(
            session,
            caller,
            webhook_id,
            delivery_id,
            settings=platform.settings,
            now=platform.clock.now(),
        )

    return await _sent(request, platform, caller, webhook_id, resources, work)


async def _sent(
    request: Request,
    platform: Platform,
    caller: Caller,
    webhook_id: str,
    resources: ResourcesDep,
    work: Work[object],
) -> Response:
    """Queues a message and has it sent."""

    async def done(_: object) -> Response:
        await deliver_soon(platform.db, resources.queue, caller.tenant_id, platform.clock.now())
        return _back(webhook_id)

    return await _submit(request, platform, caller, webhook_id, work, done)


@router.post("/{webhook_id}/rotate")
async def rotate(
    webhook_id: WebhookId, request: Request, caller: TenantAdmin, platform: PlatformDep
) -> Response:
    async def work(session: AsyncSession, form: Form) -> str:
        overlap_s = form.integer("overlap_s", 86_400)
        if overlap_s not in dict(OVERLAPS):
            raise InvalidRequest("Choose one of the times in the list.", param="overlap_s")
        _, secret = await service.rotate_secret(
            session,
            caller,
            webhook_id,
            secrets=platform.secrets,
            overlap=timedelta(seconds=overlap_s),
            now=platform.clock.now(),
        )
        return secret

    async def done(secret: str) -> Response:
        return await _page(request, platform, caller, webhook_id, secret=secret)

    return await _submit(request, platform, caller, webhook_id, work, done)


async def _submit(
    request: Request,
    platform: Platform,
    caller: Caller,
    webhook_id: str,
    work: Work[T],
    done: Callable[[T], Awaitable[Response]],
) -> Response:
    """Does what a form about one webhook asks; on a refusal its page again."""
    tenant_only(caller)

    async def find(session: AsyncSession) -> object:
        return await service.find(session, caller, webhook_id)

    async def again(_: Form, error: AppError) -> Response:
        return await _page(request, platform, caller, webhook_id, error=error)

    return await submit(request, platform.db, work, done=done, again=again, find=find)


@router.post("/{webhook_id}/enable")
async def enable(webhook_id: WebhookId, caller: TenantAdmin, platform: PlatformDep) -> Response:
    return await _switch(platform, caller, webhook_id, on=True)


@router.post("/{webhook_id}/disable")
async def disable(webhook_id: WebhookId, caller: TenantAdmin, platform: PlatformDep) -> Response:
    return await _switch(platform, caller, webhook_id, on=False)


@router.post("/{webhook_id}/delete")
async def delete(webhook_id: WebhookId, caller: TenantAdmin, platform: PlatformDep) -> Response:
    tenant_only(caller)
    async with platform.db.transaction() as session:
        await service.remove(session, caller, webhook_id, now=platform.clock.now())
    return RedirectResponse("/console/webhooks", status_code=303)


async def _switch(platform: Platform, caller: Caller, webhook_id: str, *, on: bool) -> Response:
    tenant_only(caller)
    wanted = WebhookChange(enabled=on)
    async with platform.db.transaction() as session:
        await service.change(session, caller, webhook_id, wanted, None, now=platform.clock.now())
    return _back(webhook_id)


def _back(webhook_id: str) -> Response:
    return RedirectResponse(f"/console/webhooks/{webhook_id}", status_code=303)


def _fields(form: Form) -> dict[str, Any]:
    return {
        "url": form.text("url", most=1000),
        "description": form.text("description"),
        "events": [event for event in EVENTS if form.text(event)],
    }


REFUSALS = {
    "url": "The address must be https, with at most 500 characters.",
    "events": "Choose at least one event to be told of.",
    "description": "The description is one line of at most 200 characters.",
}


def _checked(model: type[Model], fields: dict[str, Any]) -> Model:
    """Raises InvalidRequest, which names the field and the remedy."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        field = str(error.errors()[0]["loc"][0])
        raise InvalidRequest(REFUSALS[field], param=field) from None


async def _list(
    request: Request,
    platform: Platform,
    caller: Caller,
    *,
    form: Form | None = None,
    error: AppError | None = None,
) -> Response:
    async with platform.db.reading() as session:
        rows = await service.list_endpoints(session, caller)
    return render(
        request,
        "webhooks.html",
        webhooks=[_endpoint(row) for row in rows],
        events=EVENTS,
        typed=dict.fromkeys(EVENTS, "on") if form is None else form.fields,
        error=error,
        may_write=may_write(caller),
    )


async def _page(
    request: Request,
    platform: Platform,
    caller: Caller,
    webhook_id: str,
    *,
    state: DeliveryState | None = None,
    after: str | None = None,
    secret: str = "",
    form: Form | None = None,
    error: AppError | None = None,
) -> Response:
    async with platform.db.reading() as session:
        row = await service.find(session, caller, webhook_id)
        found = await service.list_deliveries(
            session, caller, webhook_id, state=state, after=after, limit=PAGE + 1
        )
    kept = {"url": row.url, "description": row.description} | dict.fromkeys(row.events, "on")
    page = render(
        request,
        "webhook.html",
        webhook=_endpoint(row),
        secret=secret,
        events=EVENTS,
        typed=kept if form is None else form.fields,
        deliveries=_deliveries(found[:PAGE]),
        older=found[PAGE - 1].id if len(found) > PAGE else None,
        state=state,
        states=get_args(DeliveryState),
        overlaps=OVERLAPS,
        waiting=after is None and any(delivery.state == "pending" for delivery in found),
        error=error,
        may_write=may_write(caller),
    )
    page.headers["Cache-Control"] = "no-store"
    return page


def _endpoint(row: WebhookEndpoint) -> dict[str, Any]:
    return {
        "id": row.id,
        "url": row.url,
        "description": row.description,
        "events": row.events,
        "enabled": row.status == "enabled",
        "disabled_because": DISABLED.get(row.disabled_reason or ""),
        "failing_since": row.failing_since,
        "last_success_at": row.last_success_at,
        "previous_until": row.previous_until,
        "created_at": row.created_at,
    }


def _deliveries(rows: Sequence[WebhookDelivery]) -> list[dict[str, Any]]:
    shown = []
    for row in rows:
        delivery = delivery_object(row)
        last = delivery.attempts[-1] if delivery.attempts else None
        shown.append(
            {
                "id": delivery.id,
                "type": delivery.type,
                "state": delivery.state,
                "at": row.created_at,
                "attempts": len(delivery.attempts),
                "code": "" if last is None else last.code.replace("_", " "),
                "status": None if last is None else last.status,
                "took_ms": None if last is None else last.duration_ms,
                "next_at": None
                if delivery.next_attempt_at is None
                else moment(delivery.next_attempt_at),
            }
        )
    return shown
