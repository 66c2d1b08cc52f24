"""A tenant's endpoints over the API."""

from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import text

from app.audit import service as audit
from app.keys.service import NewKey
from app.platform import Platform
from app.tenants.models import Tenant
from app.webhooks.sender import Sender
from tests.factories import bearer, make_key, make_tenant
from tests.unit.app.webhooks.api import EVENTS, Hooks
from tests.unit.app.webhooks.receiver import Receiver


def refusal(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


class TestRegistering:
    async def test_the_secret_is_shown_once_and_kept_sealed(
        self, hooks: Hooks, receiver: Receiver, platform: Platform
    ) -> None:
        webhook, secret = await hooks.register(receiver.url(), description="mine")
        shown = await hooks.shown(webhook)
        assert (shown["url"], shown["events"], shown["description"], shown["enabled"]) == (
            receiver.url(),
            EVENTS,
            "mine",
            True,
        )
        listed = (await hooks.send("GET")).json()
        assert [entry["id"] for entry in listed["data"]] == [webhook]
        assert secret.startswith("whsec_")
        assert secret not in str(listed) + str(shown)
        async with platform.db.reading() as session:
            rows = (await session.execute(text("SELECT * FROM webhook_endpoints"))).all()
            events = await audit.list_events(session, tenant_id=None, action="webhook.create")
        assert secret not in str(rows)
        assert secret.removeprefix("whsec_") not in str(rows)
        [event] = events
        assert receiver.url() not in str(event.detail)

    async def test_a_repeated_request_with_a_key_makes_one(
        self, hooks: Hooks, receiver: Receiver
    ) -> None:
        body = {"url": receiver.url(), "events": EVENTS}
        headers = {"idempotency-key": "once"}
        first = await hooks.send("POST", "", body, **headers)
        again = await hooks.send("POST", "", body, **headers)
        assert first.json() == again.json()
        assert len((await hooks.send("GET")).json()["data"]) == 1

    async def test_what_cannot_be_honoured_names_the_field(
        self, hooks: Hooks, receiver: Receiver, app: FastAPI
    ) -> None:
        wrong: list[tuple[dict[str, Any], tuple[int, str, str]]] = [
            ({"url": "http://example.com/"}, (400, "webhook_address_refused", "url")),
            ({"url": "https://10.0.0.1/"}, (400, "webhook_address_refused", "url")),
            ({"url": "ftp://127.0.0.1/"}, (400, "invalid_webhook_url", "url")),
            ({"url": "x" * 501}, (400, "invalid_value", "url")),
            ({"url": None}, (400, "invalid_value", "url")),
            ({"events": []}, (400, "invalid_value", "events")),
            ({"events": ["version.ready", "x"]}, (400, "invalid_value", "events[1]")),
            ({"events": "version.ready"}, (400, "invalid_value", "events")),
            ({"description": "x" * 201}, (400, "invalid_value", "description")),
            ({"description": "a\0b"}, (400, "invalid_value", "description")),
            ({"url": "https://example.com/\0"}, (400, "invalid_webhook_url", "url")),
            ({"secret": "mine"}, (400, "unknown_field", "secret")),
        ]

        async def answer(host: str, _port: int) -> list[str]:
            return [host if host[0].isdigit() else "8.8.8.8"]

        app.state.webhook_sender = Sender(
            hooks.platform.settings, hooks.platform.clock, resolver=answer
        )
        for changes, expected in wrong:
            body = {"url": receiver.url(), "events": ["version.ready"]} | changes
            assert refusal(await hooks.send("POST", "", body)) == expected
        assert (await hooks.send("GET")).json()["data"] == []

    async def test_a_tenant_has_so_many_and_no_more(
        self, hooks: Hooks, receiver: Receiver, platform: Platform
    ) -> None:
        for _ in range(platform.settings.tenant_max_webhooks):
            await hooks.register(receiver.url())
        one_more = await hooks.send("POST", "", {"url": receiver.url(), "events": EVENTS})
        assert refusal(one_more)[:2] == (409, "too_many_webhooks")


class TestChanging:
    async def test_only_what_is_sent_changes(self, hooks: Hooks, receiver: Receiver) -> None:
        webhook, _ = await hooks.register(receiver.url(), description="mine")
        changed = await hooks.send("PATCH", f"/{webhook}", {"events": ["version.ready"]})
        assert (changed.json()["events"], changed.json()["description"]) == (
            ["version.ready"],
            "mine",
        )
        moved = await hooks.send("PATCH", f"/{webhook}", {"url": receiver.url("/other")})
        assert moved.json()["url"] == receiver.url("/other")

    async def test_what_cannot_be_honoured_names_the_field(
        self, hooks: Hooks, receiver: Receiver
    ) -> None:
        webhook, _ = await hooks.register(receiver.url())
        wrong: list[tuple[object, str]] = [
            ({"url": None}, "url"),
            ({"enabled": None}, "enabled"),
            ({"enabled": "no"}, "enabled"),
            ({"url": "https://169.254.169.254/"}, "url"),
            ({"events": ["x"]}, "events[0]"),
            ({"secret": "x"}, "secret"),
        ]
        for body, param in wrong:
            answer = await hooks.send("PATCH", f"/{webhook}", body)
            assert (answer.status_code, refusal(answer)[2]) == (400, param)

    async def test_a_deleted_one_is_gone_with_its_deliveries(
        self, hooks: Hooks, receiver: Receiver
    ) -> None:
        webhook, _ = await hooks.register(receiver.url())
        await hooks.test(webhook)
        assert (await hooks.send("DELETE", f"/{webhook}")).json()["deleted"] is True
        assert refusal(await hooks.send("GET", f"/{webhook}"))[:2] == (404, "webhook_not_found")
        assert await hooks.sweep() == 0
        assert receiver.received == []


class TestWhoMay:
    ROUTES = [
        ("GET", "/{id}", None),
        ("PATCH", "/{id}", {"description": "taken over"}),
        ("DELETE", "/{id}", None),
        ("POST", "/{id}/rotate", {}),
        ("POST", "/{id}/test", None),
        ("GET", "/{id}/deliveries", None),
        ("POST", "/{id}/deliveries/{delivery}/resend", None),
    ]

    async def test_a_foreign_webhook_is_an_unknown_one(
        self, hooks: Hooks, receiver: Receiver, platform: Platform
    ) -> None:
        webhook, _ = await hooks.register(receiver.url())
        delivery = await hooks.test(webhook)
        stranger = hooks.of(await make_key(platform, await make_tenant(platform)))
        unknown_id = "whe_" + "0" * 26
        for method, path, body in self.ROUTES:
            foreign, unknown = [
                await stranger.send(method, path.format(id=id_, delivery=delivery), body)
                for id_ in (webhook, unknown_id)
            ]
            assert foreign.status_code == unknown.status_code == 404, path
            assert foreign.text.replace(webhook, unknown_id) == unknown.text
        assert (await hooks.shown(webhook))["description"] == ""

    async def test_another_webhooks_delivery_is_an_unknown_one(
        self, hooks: Hooks, receiver: Receiver
    ) -> None:
        first, _ = await hooks.register(receiver.url())
        second, _ = await hooks.register(receiver.url())
        delivery = await hooks.test(first)
        answer = await hooks.send("POST", f"/{second}/deliveries/{delivery}/resend")
        assert refusal(answer) == (404, "delivery_not_found", "delivery_id")

    async def test_a_key_that_may_see_some_adapters_has_no_webhooks(
        self, hooks: Hooks, platform: Platform, tenant: Tenant, receiver: Receiver
    ) -> None:
        webhook, _ = await hooks.register(receiver.url())
        scoped = hooks.of(await make_key(platform, tenant, adapters=["bot"]))
        for method, path, body in self.ROUTES:
            answer = await scoped.send(method, path.format(id=webhook, delivery="x"), body)
            assert refusal(answer)[:2] == (403, "key_scope"), path
        made = await scoped.send("POST", "", {"url": receiver.url(), "events": EVENTS})
        assert refusal(made)[:2] == (403, "key_scope")


class TestWhatIsNoId:
    """Asked of PostgreSQL too, which takes no text with a NUL."""

    @pytest.fixture
    def database_url(self, any_database_url: str) -> str:
        return any_database_url

    async def test_it_is_an_unknown_one_or_names_the_field(
        self, hooks: Hooks, receiver: Receiver, platform: Platform
    ) -> None:
        webhook, _ = await hooks.register(receiver.url())
        for id_ in ("x", "%00", "whe_%00", "w" * 65, "whe_%F0%9F%90%88"):
            answer = await hooks.send("GET", f"/{id_}")
            assert answer.status_code in (400, 404), id_
            resent = await hooks.send("POST", f"/{webhook}/deliveries/{id_}/resend")
            assert resent.status_code in (400, 404), id_
        page = await hooks.send("GET", f"/{webhook}/deliveries?after=%00")
        assert refusal(page) == (400, "invalid_value", "after")
        operator = bearer(await make_key(platform, None))
        everyones = await hooks.client.get("/admin/v1/webhooks?tenant_id=%00", headers=operator)
        assert refusal(everyones) == (400, "invalid_value", "tenant_id")


class TestOperators:
    async def operator(
        self, client: httpx.AsyncClient, platform: Platform, method: str, path: str
    ) -> httpx.Response:
        key: NewKey = await make_key(platform, None)
        return await client.request(method, f"/admin/v1/webhooks{path}", headers=bearer(key))

    async def test_see_all_tenants_and_may_stop_one(
        self, hooks: Hooks, receiver: Receiver, platform: Platform, tenant: Tenant
    ) -> None:
        webhook, _ = await hooks.register(receiver.url())
        other = hooks.of(await make_key(platform, await make_tenant(platform)))
        await other.register(receiver.url())
        await hooks.test(webhook)
        client = hooks.client
        everything = await self.operator(client, platform, "GET", "")
        assert len(everything.json()["data"]) == 2
        one = await self.operator(client, platform, "GET", f"?tenant_id={tenant.id}")
        assert [entry["id"] for entry in one.json()["data"]] == [webhook]
        stopped = await self.operator(client, platform, "POST", f"/{webhook}/disable")
        assert (stopped.status_code, stopped.json()["enabled"]) == (200, False)
        dead = await self.operator(client, platform, "GET", "/deliveries?state=dead")
        assert [entry["code"] for entry in dead.json()["data"]] == ["endpoint_disabled"]
        assert await hooks.sweep() == 0
        refused = await hooks.send("POST", f"/{webhook}/test")
        assert refusal(refused)[:2] == (409, "webhook_disabled")
        enabled = await hooks.send("PATCH", f"/{webhook}", {"enabled": True})
        assert (enabled.json()["enabled"], enabled.json()["disabled_reason"]) == (True, None)


async def test_the_routes_are_described(hooks: Hooks) -> None:
    document = (await hooks.client.get("/docs/openapi.json")).json()
    for path, method in (
        ("/v1/webhooks", "post"),
        ("/v1/webhooks/{webhook_id}/deliveries", "get"),
        ("/v1/adapters/{name}/aliases/{alias}/comparison", "get"),
        ("/v1/adapters/{name}/aliases/{alias}/rollback", "post"),
        ("/admin/v1/webhooks", "get"),
    ):
        answers = document["paths"][path][method]["responses"]
        schemas = [
            answer["content"]["application/json"]["schema"]
            for code, answer in answers.items()
            if code.startswith("2")
        ]
        assert ["$ref" in schema for schema in schemas] == [True], path
