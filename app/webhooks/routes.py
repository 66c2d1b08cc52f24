"""/v1/webhooks and /admin/v1/webhooks."""

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Path, Query

from app.adapters.deps import ResourcesDep
from app.audit.service import actor_id
from app.auth import ApiCaller, OperatorCaller
from app.deps import IdempotencyKey, PlatformDep, ReadSession, Session
from app.idempotency.service import create_once
from app.paging import PageDep
from app.webhooks import repository, service
from app.webhooks.deps import SenderDep
from app.webhooks.outbox import deliver_soon
from app.webhooks.schemas import (
    DeletedWebhook,
    DeliveryList,
    DeliveryObject,
    DeliveryState,
    OperatorWebhookList,
    OperatorWebhookObject,
    RotateSecretIn,
    WebhookChange,
    WebhookIn,
    WebhookList,
    WebhookObject,
    WebhookWithSecret,
    delivery_list,
    delivery_object,
    operator_object,
    webhook_object,
)

router = APIRouter()

WebhookId = Annotated[str, Path(max_length=64)]
DeliveryId = Annotated[str, Path(max_length=64)]
TenantId = Annotated[str | None, Query(max_length=40, pattern=r"^[^\x00]*$")]
State = Annotated[DeliveryState | None, Query()]


@router.post("/v1/webhooks", tags=["webhooks"], status_code=201)
async def create_webhook(
    body: WebhookIn,
    caller: ApiCaller,
    platform: PlatformDep,
    sender: SenderDep,
    key: IdempotencyKey = None,
) -> WebhookWithSecret:
    """The secret that messages are signed with is in this answer alone."""
    service.require_writer(caller)
    url = await sender.check(body.url)
    now = platform.clock.now()
    async with platform.db.transaction() as session:

        async def create() -> WebhookWithSecret:
            row, secret = await service.create(
                session,
                caller,
                body,
                url,
                secrets=platform.secrets,
                settings=platform.settings,
                now=now,
            )
            return WebhookWithSecret(id=row.id, secret=secret, webhook=webhook_object(row))

        return await create_once(
            session,
            create,
            WebhookWithSecret,
            key=key,
            caller_id=actor_id(caller),
            route="webhooks",
            body=body,
            secrets=platform.secrets,
            now=now,
        )


@router.get("/v1/webhooks", tags=["webhooks"])
async def list_webhooks(caller: ApiCaller, session: ReadSession) -> WebhookList:
    rows = await service.list_endpoints(session, caller)
    return WebhookList(data=[webhook_object(row) for row in rows])


@router.get("/v1/webhooks/{webhook_id}", tags=["webhooks"])
async def get_webhook(
    webhook_id: WebhookId, caller: ApiCaller, session: ReadSession
) -> WebhookObject:
    return webhook_object(await service.find(session, caller, webhook_id))


@router.patch("/v1/webhooks/{webhook_id}", tags=["webhooks"])
async def change_webhook(
    webhook_id: WebhookId,
    body: WebhookChange,
    caller: ApiCaller,
    platform: PlatformDep,
    sender: SenderDep,
) -> WebhookObject:
    """Only what is sent changes. Disabling ends what is still to be delivered."""
    service.require_writer(caller)
    async with platform.db.reading() as session:
        await service.find(session, caller, webhook_id)
    url = None if body.url is None else await sender.check(body.url)
    async with platform.db.transaction() as session:
        row = await service.change(session, caller, webhook_id, body, url, now=platform.clock.now())
        return webhook_object(row)


@router.delete("/v1/webhooks/{webhook_id}", tags=["webhooks"])
async def delete_webhook(
    webhook_id: WebhookId, caller: ApiCaller, platform: PlatformDep, session: Session
) -> DeletedWebhook:
    """With its deliveries."""
    await service.remove(session, caller, webhook_id, now=platform.clock.now())
    return DeletedWebhook(id=webhook_id)


@router.post("/v1/webhooks/{webhook_id}/rotate", tags=["webhooks"])
async def rotate_secret(
    webhook_id: WebhookId,
    caller: ApiCaller,
    platform: PlatformDep,
    session: Session,
    body: RotateSecretIn | None = None,
    key: IdempotencyKey = None,
) -> WebhookWithSecret:
    """A new secret; until the overlap ends messages carry a signature of the old one too."""
    wanted = body or RotateSecretIn()
    now = platform.clock.now()

    async def rotate() -> WebhookWithSecret:
        row, secret = await service.rotate_secret(
            session,
            caller,
            webhook_id,
            secrets=platform.secrets,
            overlap=timedelta(seconds=wanted.overlap_s),
            now=now,
        )
        return WebhookWithSecret(id=row.id, secret=secret, webhook=webhook_object(row))

    return await create_once(
        session,
        rotate,
        WebhookWithSecret,
        key=key,
        caller_id=actor_id(caller),
        route=f"webhooks/{webhook_id}/rotate",
        body=wanted,
        secrets=platform.secrets,
        now=now,
    )


# --------------------------------------------------------------------------- deliveries


@router.post("/v1/webhooks/{webhook_id}/test", tags=["webhooks"], status_code=202)
async def send_test(
    webhook_id: WebhookId, caller: ApiCaller, platform: PlatformDep, resources: ResourcesDep
) -> DeliveryObject:
    """Queues a `webhook.test` event; its delivery shows how it went."""
    now = platform.clock.now()
    async with platform.db.transaction() as session:
        row = await service.send_test(
            session, caller, webhook_id, settings=platform.settings, now=now
        )
        shown = delivery_object(row)
    await deliver_soon(platform.db, resources.queue, caller.tenant_id, now)
    return shown


@router.get("/v1/webhooks/{webhook_id}/deliveries", tags=["webhooks"])
async def list_deliveries(
    webhook_id: WebhookId,
    caller: ApiCaller,
    session: ReadSession,
    page: PageDep,
    state: State = None,
) -> DeliveryList:
    """Newest first, with every attempt's status and time; never what was answered."""
    rows = await service.list_deliveries(
        session, caller, webhook_id, state=state, after=page.after, limit=page.fetch
    )
    return delivery_list([delivery_object(row) for row in rows], page.limit)


@router.post(
    "/v1/webhooks/{webhook_id}/deliveries/{delivery_id}/resend", tags=["webhooks"], status_code=202
)
async def resend(
    webhook_id: WebhookId,
    delivery_id: DeliveryId,
    caller: ApiCaller,
    platform: PlatformDep,
    resources: ResourcesDep,
) -> DeliveryObject:
    """Makes a delivery due now, whatever came of it; the message keeps its `webhook-id`."""
    now = platform.clock.now()
    async with platform.db.transaction() as session:
        row = await service.resend(
            session, caller, webhook_id, delivery_id, settings=platform.settings, now=now
        )
        shown = delivery_object(row)
    await deliver_soon(platform.db, resources.queue, caller.tenant_id, now)
    return shown


# --------------------------------------------------------------------------- operators


@router.get("/admin/v1/webhooks", tags=["operator: webhooks"])
async def list_all_webhooks(
    _: OperatorCaller,
    session: ReadSession,
    page: PageDep,
    tenant_id: TenantId = None,
) -> OperatorWebhookList:
    """Every tenant's webhooks, or one tenant's."""
    rows = await repository.page_endpoints(
        session, tenant_id=tenant_id, after=page.after, limit=page.fetch
    )
    shown = [operator_object(row) for row in rows[: page.limit]]
    return OperatorWebhookList(
        data=shown, last_id=shown[-1].id if shown else None, has_more=len(rows) > page.limit
    )


@router.get("/admin/v1/webhooks/deliveries", tags=["operator: webhooks"])
async def list_all_deliveries(
    _: OperatorCaller,
    session: ReadSession,
    page: PageDep,
    tenant_id: TenantId = None,
    state: State = None,
) -> DeliveryList:
    """Deliveries of all tenants, such as those that are dead."""
    rows = await repository.page_deliveries(
        session,
        endpoint_id=None,
        tenant_id=tenant_id,
        state=state,
        after=page.after,
        limit=page.fetch,
    )
    return delivery_list([delivery_object(row) for row in rows], page.limit)


@router.post("/admin/v1/webhooks/{webhook_id}/disable", tags=["operator: webhooks"])
async def disable_webhook(
    webhook_id: WebhookId, caller: OperatorCaller, platform: PlatformDep, session: Session
) -> OperatorWebhookObject:
    """Nothing more is sent there until its tenant enables it again."""
    row = await service.disable_any(session, caller, webhook_id, now=platform.clock.now())
    return operator_object(row)
