"""The answer to a request for another limit is told in the transaction of the answer."""

from typing import Any

import pytest

from app.limit_requests import service
from app.platform import Platform
from app.tenants.models import Tenant
from app.tenants.service import effective_limits
from app.webhooks.outbox import DELIVER_TASK
from tests.factories import bearer, make_caller, make_key
from tests.unit.app.webhooks.api import Hooks
from tests.unit.app.webhooks.receiver import Receiver
from tests.validation_bench import Bench


async def ask(platform: Platform, tenant: Tenant) -> str:
    async with platform.db.transaction() as session:
        row = await service.ask(
            session,
            make_caller(platform, tenant),
            limit_name="max_adapters",
            wanted=30.0,
            reason="a launch",
            settings=platform.settings,
            now=platform.clock.now(),
        )
    return row.id


@pytest.mark.parametrize(
    ("verb", "body", "told"),
    [
        ("approve", {"value": 20}, {"state": "approved", "granted": 20, "answer": ""}),
        ("decline", {"answer": "full"}, {"state": "declined", "granted": None, "answer": "full"}),
    ],
)
async def test_an_answer_is_told_at_once_with_what_it_set(
    hooks: Hooks,
    receiver: Receiver,
    bench: Bench,
    tenant: Tenant,
    verb: str,
    body: dict[str, Any],
    told: dict[str, Any],
) -> None:
    _, secret = await hooks.register(receiver.url())
    request_id = await ask(hooks.platform, tenant)
    operator = bearer(await make_key(hooks.platform, None))
    path = f"/admin/v1/limit-requests/{request_id}/{verb}"
    assert (await hooks.client.post(path, json=body, headers=operator)).status_code == 200
    [(task, _)] = bench.queue.messages
    assert task == DELIVER_TASK
    await hooks.sweep()
    message = receiver.received[0].verify(secret)
    assert isinstance(message, dict)
    assert message["type"] == "limits.decided"
    assert message["data"] == {
        "limit_request_id": request_id,
        "limit": "max_adapters",
        "current": effective_limits(tenant, hooks.platform.settings).max_adapters,
        "wanted": 30,
        **told,
    }


async def test_what_the_tenant_withdrew_itself_is_told_to_nobody(
    hooks: Hooks, receiver: Receiver, tenant: Tenant
) -> None:
    webhook, _ = await hooks.register(receiver.url())
    request_id = await ask(hooks.platform, tenant)
    async with hooks.platform.db.transaction() as session:
        caller = make_caller(hooks.platform, tenant)
        await service.withdraw(session, caller, request_id, now=hooks.platform.clock.now())
    assert await hooks.deliveries(webhook) == []
