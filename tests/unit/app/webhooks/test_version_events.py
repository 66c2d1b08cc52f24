"""What becomes of a version is told in the transaction in which it became that."""

import pytest

from app.adapters import validation
from app.adapters.tasks import sweep as adapters_sweep
from app.webhooks.outbox import DELIVER_TASK
from tests.adapter_files import good_adapter, tiny_description
from tests.unit.app.webhooks.api import Hooks
from tests.unit.app.webhooks.receiver import Receiver
from tests.validation_bench import Bench, post_upload

BASE = tiny_description()


async def upload(hooks: Hooks) -> str:
    answer = await post_upload(hooks.client, hooks.key, good_adapter(BASE), "bot")
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


async def test_a_version_that_is_ready_is_told_with_its_name_and_number(
    hooks: Hooks, receiver: Receiver, bench: Bench
) -> None:
    _, secret = await hooks.register(receiver.url())
    version = await upload(hooks)
    assert await bench.work() == ["ready"]
    [(task, _)] = bench.queue.messages
    assert task == DELIVER_TASK
    await hooks.sweep()
    message = receiver.received[0].verify(secret)
    assert isinstance(message, dict)
    assert message["type"] == "version.ready"
    assert message["data"] == {
        "adapter": "bot",
        "adapter_id": message["data"]["adapter_id"],
        "version": 1,
        "version_id": version,
        "state": "ready",
        "code": None,
        "reason": None,
    }


async def test_a_rejected_one_is_told_with_its_code(
    hooks: Hooks, receiver: Receiver, bench: Bench
) -> None:
    webhook, secret = await hooks.register(receiver.url())
    bench.engine.poison = True
    await upload(hooks)
    assert await bench.work() == ["rejected"]
    await hooks.sweep()
    message = receiver.received[0].verify(secret)
    assert isinstance(message, dict)
    assert (message["type"], message["data"]["code"]) == ("version.rejected", "non_finite_logits")
    assert len(await hooks.deliveries(webhook)) == 1


async def test_one_whose_validation_failed_for_good_is_told(
    hooks: Hooks, receiver: Receiver, bench: Bench
) -> None:
    webhook, _ = await hooks.register(receiver.url())
    version = await upload(hooks)
    settings = hooks.platform.settings
    for _ in range(settings.validation_attempts):
        await validation._claim(bench.resources, version)
        hooks.platform.clock.advance(  # type: ignore[attr-defined]
            seconds=settings.validation_lease_s + 1
        )
        await adapters_sweep(bench.resources)
    assert [shown["type"] for shown in await hooks.deliveries(webhook)] == ["version.failed"]


@pytest.mark.parametrize("listens", [True, False])
async def test_a_verdict_does_not_depend_on_who_listens(
    listens: bool, hooks: Hooks, receiver: Receiver, bench: Bench
) -> None:
    if listens:
        await hooks.register(receiver.url())
    await upload(hooks)
    assert await bench.work() == ["ready"]
    assert await hooks.sweep() == int(listens)
