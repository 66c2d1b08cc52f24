"""From the outbox to a receiver on a real socket: signed, retried, given up, sent again."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import event, update

from app.audit import service as audit
from app.clock import FrozenClock
from app.crypto import FileSource
from app.platform import Platform
from app.rotation import versions_in_use
from app.tenants.models import Tenant
from app.webhooks import delivery, outbox, repository, service
from app.webhooks.models import WebhookDelivery
from app.webhooks.outbox import DELIVER_TASK, emit
from app.webhooks.sender import Sender
from tests.factories import make_key, make_tenant
from tests.unit.app.webhooks.api import Hooks
from tests.unit.app.webhooks.receiver import Receiver, status
from tests.validation_bench import Bench


@pytest.fixture
def database_url(any_database_url: str) -> str:
    return any_database_url


async def happen(
    platform: Platform, tenant: Tenant, type_: str = outbox.VERSION_READY, **data: Any
) -> None:
    async with platform.db.transaction() as session:
        await emit(
            session,
            tenant_id=tenant.id,
            type_=type_,
            data=data,
            now=platform.clock.now(),
            give_up_s=platform.settings.webhook_give_up_s,
        )


async def test_a_busy_receiver_is_left_alone_for_as_long_as_it_asks(
    hooks: Hooks, receiver: Receiver, clock: FrozenClock
) -> None:
    receiver.answers = [status(429, "retry-after: 600"), status(204)]
    webhook, _ = await hooks.register(receiver.url())
    await hooks.test(webhook)
    assert await hooks.sweep() == 1
    clock.advance(seconds=599)
    assert await hooks.sweep() == 0
    clock.advance(seconds=1)
    assert await hooks.sweep() == 1
    [shown] = await hooks.deliveries(webhook)
    assert (shown["state"], [a["status"] for a in shown["attempts"]]) == ("delivered", [429, 204])


async def test_metrics_count_attempts_and_tell_what_waits(
    hooks: Hooks, receiver: Receiver, clock: FrozenClock
) -> None:
    receiver.answers = [status(500), status(204)]
    webhook, _ = await hooks.register(receiver.url())
    await hooks.test(webhook)
    clock.advance(seconds=40)
    assert await figures(hooks) == {
        "loramux_webhook_pending": 1, "loramux_webhook_oldest_pending_seconds": 40,
        "loramux_webhook_overdue_seconds": 40,
    }  # fmt: skip
    await hooks.sweep()
    failed = 'loramux_webhook_attempts_total{outcome="http_error"}'
    assert await figures(hooks) == {
        failed: 1, "loramux_webhook_pending": 1, "loramux_webhook_oldest_pending_seconds": 40,
        "loramux_webhook_overdue_seconds": 0,
    }  # fmt: skip
    clock.advance(seconds=60)
    await hooks.sweep()
    assert await figures(hooks) == {
        failed: 1, 'loramux_webhook_attempts_total{outcome="delivered"}': 1,
        "loramux_webhook_pending": 0, "loramux_webhook_oldest_pending_seconds": 0,
        "loramux_webhook_overdue_seconds": 0,
    }  # fmt: skip


async def figures(hooks: Hooks) -> dict[str, float]:
    """The webhooks' samples of /metrics."""
    text = (await hooks.client.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("loramux_webhook_")]
    return {name: float(value) for name, value in (line.split(" ") for line in lines)}


class TestTheMessage:
    async def test_the_specifications_verifier_takes_it_with_the_secret_that_was_shown(
        self, hooks: Hooks, receiver: Receiver, platform: Platform, tenant: Tenant
    ) -> None:
        webhook, secret = await hooks.register(receiver.url())
        await happen(platform, tenant, adapter="bot", version=3)
        assert await hooks.sweep() == 1
        [message] = receiver.received
        assert message.verify(secret) == {
            "type": "version.ready",
            "timestamp": platform.clock.now().isoformat(),
            "data": {"adapter": "bot", "version": 3},
        }
        [shown] = await hooks.deliveries(webhook)
        assert (shown["state"], shown["code"], shown["event_id"]) == (
            "delivered",
            "delivered",
            message.headers["webhook-id"],
        )
        assert [(a["attempt"], a["status"]) for a in shown["attempts"]] == [(1, 204)]
        assert (await hooks.shown(webhook))["last_success_at"] is not None

    async def test_what_the_receiver_answers_is_kept_nowhere(
        self, hooks: Hooks, receiver: Receiver, platform: Platform
    ) -> None:
        receiver.answers = [status(500, "x-secret: canary-head", body=b"canary-body")]
        webhook, _ = await hooks.register(receiver.url())
        await hooks.test(webhook)
        await hooks.sweep()
        [shown] = await hooks.deliveries(webhook)
        assert [a["status"] for a in shown["attempts"]] == [500]
        async with platform.db.reading() as session:
            rows = await repository.page_deliveries(
                session, endpoint_id=webhook, tenant_id=None, state=None, after=None, limit=9
            )
        assert "canary" not in str(shown) + str([vars(row) for row in rows])

    async def test_each_endpoint_gets_what_it_asked_for_once(
        self, hooks: Hooks, receiver: Receiver, platform: Platform, tenant: Tenant
    ) -> None:
        await hooks.register(receiver.url("/all"))
        await hooks.register(receiver.url("/ready"), events=["version.ready"])
        off, _ = await hooks.register(receiver.url("/off"))
        await hooks.send("PATCH", f"/{off}", {"enabled": False})
        await happen(platform, tenant)
        await happen(platform, tenant, outbox.VERSION_REJECTED)
        assert await hooks.sweep() == 3
        assert await hooks.sweep() == 0
        paths = sorted(message.request_line.split()[1] for message in receiver.received)
        assert paths == ["/all", "/all", "/ready"]

    async def test_an_event_of_a_transaction_that_rolls_back_never_happened(
        self, hooks: Hooks, receiver: Receiver, platform: Platform, tenant: Tenant
    ) -> None:
        await hooks.register(receiver.url())
        async with platform.db.transaction() as session:
            await emit(
                session,
                tenant_id=tenant.id,
                type_=outbox.VERSION_READY,
                data={},
                now=platform.clock.now(),
                give_up_s=60,
            )
            await session.rollback()
        assert await hooks.sweep() == 0


class TestFailures:
    async def test_it_is_tried_again_until_it_is_taken_under_the_same_id(
        self, hooks: Hooks, receiver: Receiver, clock: FrozenClock
    ) -> None:
        receiver.answers = [status(500), status(503), status(204)]
        webhook, secret = await hooks.register(receiver.url())
        await hooks.test(webhook)
        assert await hooks.sweep() == 1
        assert await hooks.sweep() == 0
        assert (await hooks.shown(webhook))["failing_since"] is not None
        clock.advance(seconds=12)
        assert await hooks.sweep() == 1
        clock.advance(seconds=36)
        assert await hooks.sweep() == 1
        [shown] = await hooks.deliveries(webhook)
        assert [a["status"] for a in shown["attempts"]] == [500, 503, 204]
        assert shown["state"] == "delivered"
        assert len({message.headers["webhook-id"] for message in receiver.received}) == 1
        assert len({message.body for message in receiver.received}) == 1
        assert receiver.received[0].verify(secret)
        assert (await hooks.shown(webhook))["failing_since"] is None

    async def test_after_a_day_it_is_dead_visible_and_can_be_sent_again(
        self, hooks: Hooks, receiver: Receiver, clock: FrozenClock
    ) -> None:
        receiver.answers = [status(500)]
        webhook, _ = await hooks.register(receiver.url())
        sent = await hooks.test(webhook)
        began = clock.now()
        attempts = await hooks.sweep_until_dead(webhook)
        assert 8 <= attempts <= 11
        assert 86_400 <= (clock.now() - began).total_seconds() < 90_000
        [dead] = await hooks.deliveries(webhook, "?state=dead")
        assert (dead["id"], dead["code"], dead["next_attempt_at"]) == (sent, "http_error", None)
        receiver.answers = [status(204)]
        again = await hooks.send("POST", f"/{webhook}/deliveries/{sent}/resend")
        assert (again.status_code, again.json()["state"]) == (202, "pending")
        assert await hooks.sweep() == 1
        [shown] = await hooks.deliveries(webhook)
        assert (shown["state"], len(shown["attempts"])) == ("delivered", attempts + 1)

    async def test_one_that_took_nothing_for_days_is_disabled_with_an_audit_event(
        self, hooks: Hooks, receiver: Receiver, platform: Platform, tenant: Tenant
    ) -> None:
        receiver.answers = [status(500)]
        webhook, _ = await hooks.register(receiver.url())
        for _ in range(2):
            await hooks.test(webhook)
            await hooks.sweep_until_dead(webhook)
            assert (await hooks.shown(webhook))["enabled"] is True
        await hooks.test(webhook)
        await hooks.sweep_until_dead(webhook)
        shown = await hooks.shown(webhook)
        assert (shown["enabled"], shown["disabled_reason"]) == (False, "failing")
        async with platform.db.reading() as session:
            [told] = await audit.list_events(session, tenant_id=tenant.id, action="webhook.disable")
        assert (told.target, told.actor_id, told.detail["code"]) == (
            webhook,
            "worker",
            "http_error",
        )
        await happen(platform, tenant)
        assert len(await hooks.deliveries(webhook, "?state=pending")) == 0

    async def test_one_that_says_gone_is_disabled_at_once(
        self, hooks: Hooks, receiver: Receiver
    ) -> None:
        receiver.answers = [status(410)]
        webhook, _ = await hooks.register(receiver.url())
        await hooks.test(webhook)
        await hooks.test(webhook)
        await hooks.sweep()
        shown = await hooks.shown(webhook)
        assert (shown["enabled"], shown["disabled_reason"]) == (False, "gone")
        assert {d["state"] for d in await hooks.deliveries(webhook)} == {"dead"}

    async def test_what_was_written_while_it_was_being_disabled_is_not_sent(
        self, hooks: Hooks, receiver: Receiver, platform: Platform
    ) -> None:
        webhook, _ = await hooks.register(receiver.url())
        await hooks.test(webhook)
        async with platform.db.transaction() as session:
            row = await repository.endpoint(session, webhook, None)
            assert row is not None
            row.status = repository.DISABLED
        await hooks.sweep()
        assert receiver.received == []
        assert [d["code"] for d in await hooks.deliveries(webhook)] == ["endpoint_disabled"]

    async def test_a_worker_that_died_leaves_it_to_the_next(
        self, hooks: Hooks, receiver: Receiver, platform: Platform, clock: FrozenClock
    ) -> None:
        webhook, _ = await hooks.register(receiver.url())
        id_ = await hooks.test(webhook)
        prepared = await delivery._prepare(platform, id_, hinted=False)
        assert isinstance(prepared, delivery._Attempt)
        assert await hooks.sweep() == 0
        clock.advance(seconds=delivery.LEASE_S + 1)
        assert await hooks.sweep() == 1
        [shown] = await hooks.deliveries(webhook)
        assert [a["attempt"] for a in shown["attempts"]] == [2]

    async def test_two_workers_send_it_once(
        self, hooks: Hooks, receiver: Receiver, platform: Platform, sender: Sender
    ) -> None:
        webhook, _ = await hooks.register(receiver.url())
        id_ = await hooks.test(webhook)
        results = await asyncio.gather(*(delivery.deliver(platform, sender, id_) for _ in range(4)))
        assert sorted(results) == ["delivered", "not due", "not due", "not due"]
        assert len(receiver.received) == 1


class TestSharingAWorker:
    async def test_one_tenants_flood_leaves_room_for_anothers_message(
        self, hooks: Hooks, receiver: Receiver, platform: Platform, tenant: Tenant
    ) -> None:
        await hooks.register(receiver.url("/flood"))
        for _ in range(delivery.SWEEP_BATCH + 10):
            await happen(platform, tenant)
        other = hooks.of(await make_key(platform, await make_tenant(platform)))
        webhook, _ = await other.register(receiver.url("/other"))
        await other.test(webhook)
        assert await hooks.sweep() == delivery.SWEEP_PER_TENANT + 1
        assert "/other" in [message.request_line.split()[1] for message in receiver.received]

    async def test_a_failing_endpoint_gets_no_hints_and_a_hint_to_it_sends_nothing(
        self,
        hooks: Hooks,
        receiver: Receiver,
        platform: Platform,
        sender: Sender,
        bench: Bench,
    ) -> None:
        receiver.answers = [status(500)]
        webhook, _ = await hooks.register(receiver.url())
        first = await hooks.test(webhook)
        assert bench.queue.messages == [(DELIVER_TASK, first)]
        assert await delivery.deliver(platform, sender, first, hinted=True) == "http_error"
        bench.queue.messages.clear()
        second = await hooks.test(webhook)
        assert bench.queue.messages == []
        assert await delivery.deliver(platform, sender, second, hinted=True) == "left to the sweep"
        assert await hooks.sweep() == 1

    async def test_a_broker_that_is_away_costs_no_message(
        self, hooks: Hooks, receiver: Receiver, bench: Bench
    ) -> None:
        bench.queue.away = True
        webhook, _ = await hooks.register(receiver.url())
        await hooks.test(webhook)
        assert await hooks.sweep() == 1

    async def test_only_so_many_wait_for_one_endpoint(
        self, hooks: Hooks, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(service, "MAX_PENDING", 2)
        webhook, _ = await hooks.register(receiver.url())
        await hooks.test(webhook)
        await hooks.test(webhook)
        refused = await hooks.send("POST", f"/{webhook}/test")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_pending")


class TestSecrets:
    async def test_a_rotation_signs_with_both_until_the_overlap_ends(
        self, hooks: Hooks, receiver: Receiver, clock: FrozenClock
    ) -> None:
        webhook, old = await hooks.register(receiver.url())
        rotated = await hooks.send("POST", f"/{webhook}/rotate", {"overlap_s": 60})
        new = rotated.json()["secret"]
        await hooks.test(webhook)
        await hooks.sweep()
        [both] = receiver.received
        assert both.verify(old) == both.verify(new)
        clock.advance(seconds=61)
        await hooks.test(webhook)
        await hooks.sweep()
        assert len(receiver.received[1].headers["webhook-signature"].split()) == 1
        assert receiver.received[1].verify(new)

    async def test_a_leaked_secret_signs_no_more_at_once(
        self, hooks: Hooks, receiver: Receiver
    ) -> None:
        webhook, _ = await hooks.register(receiver.url())
        await hooks.send("POST", f"/{webhook}/rotate", {"overlap_s": 0})
        await hooks.test(webhook)
        await hooks.sweep()
        assert len(receiver.received[0].headers["webhook-signature"].split()) == 1

    async def test_they_move_to_the_root_secrets_new_version(
        self, hooks: Hooks, receiver: Receiver, platform: Platform
    ) -> None:
        webhook, secret = await hooks.register(receiver.url())
        await hooks.send("POST", f"/{webhook}/rotate", {"overlap_s": 60})
        source = FileSource(platform.settings.root_secret_file)
        source.rotate()
        platform.secrets.reload()
        now = platform.clock.now()
        async with platform.db.reading() as session:
            assert (await versions_in_use(session, now))[1] >= 2
        async with platform.db.transaction() as session:
            assert await service.reseal(session, platform.secrets, now, 10) == 1
            assert await service.reseal(session, platform.secrets, now, 10) == 0
        source.drop(1)
        platform.secrets.reload()
        async with platform.db.reading() as session:
            row = await repository.endpoint(session, webhook, None)
            assert row is not None
            assert secret in delivery.open_secrets(platform.secrets, row, now)

    async def test_one_that_cannot_be_opened_fails_visibly(
        self, hooks: Hooks, receiver: Receiver, platform: Platform
    ) -> None:
        webhook, _ = await hooks.register(receiver.url())
        await hooks.test(webhook)
        source = FileSource(platform.settings.root_secret_file)
        source.rotate()
        source.drop(1)
        platform.secrets.reload()
        await hooks.sweep()
        assert receiver.received == []
        async with platform.db.reading() as session:
            [row] = await repository.page_deliveries(
                session, endpoint_id=webhook, tenant_id=None, state=None, after=None, limit=9
            )
        assert (row.state, row.code) == ("pending", "secret_unreadable")


async def test_old_deliveries_are_removed_and_new_ones_stay(
    hooks: Hooks, receiver: Receiver, platform: Platform, clock: FrozenClock
) -> None:
    webhook, _ = await hooks.register(receiver.url())
    old = await hooks.test(webhook)
    await hooks.sweep()
    async with platform.db.transaction() as session:
        await session.execute(
            update(WebhookDelivery)
            .where(WebhookDelivery.id == old)
            .values(finished_at=clock.now() - delivery.KEEP * 2)
        )
    kept = await hooks.test(webhook)
    assert await delivery.clean(platform) == 1
    assert [shown["id"] for shown in await hooks.deliveries(webhook)] == [kept]


async def test_looking_for_what_is_due_reads_an_index_alone(platform: Platform) -> None:
    statements: list[tuple[str, Any]] = []

    def note(_c: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        statements.append((statement, parameters))

    event.listen(platform.db.engine.sync_engine, "before_cursor_execute", note)
    async with platform.db.reading() as session:
        await repository.due(session, platform.clock.now(), 10)
    event.remove(platform.db.engine.sync_engine, "before_cursor_execute", note)
    [(statement, parameters)] = [s for s in statements if "webhook_deliveries" in s[0]]
    async with platform.db.reading() as session:
        connection = await session.connection()
        explain = "EXPLAIN QUERY PLAN"
        if not platform.db.url.startswith("sqlite"):
            explain = "EXPLAIN"
            await connection.exec_driver_sql("SET LOCAL enable_seqscan = off")  # so small a table
        plan = await connection.exec_driver_sql(f"{explain} {statement}", parameters)
        assert any("ix_webhook_deliveries_due" in str(row) for row in plan)
