"""Every operation of the OpenAPI document, asked by those who must not have what it gives.

A foreign tenant, with ids that are somebody's, gets byte for byte what unknown ids get. A key
that may not (any more) is refused on every operation, before anything is read.
"""

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from app.caller import KeyLimits
from app.clock import FrozenClock
from app.keys import service as keys
from app.keys.service import NewKey
from app.main import create_app
from app.platform import Platform
from app.tenants import deletion
from app.tenants.models import Tenant
from tests.factories import bearer, make_key, make_tenant, make_user, sign_in
from tests.fake_engine import FakeEngine
from tests.security.openapi_calls import Operation, Values, call, operations
from tests.serving import install_engines, make_ready_adapter

Document = Mapping[str, Any]
UNKNOWN = "unknown"
OWN_HEADERS = {"x-request-id", "date"}
"""What no two answers share."""
CREATED_BY_API = {
    "upload_id": ("/v1/uploads", {"name": "support", "config_bytes": 10, "weights_bytes": 10}),
    "webhook_id": ("/v1/webhooks", {"url": "https://1.1.1.1/hook", "events": ["version.ready"]}),
    "key_id": ("/v1/keys", {"name": "theirs"}),
    "request_id": ("/v1/limit-requests", {"limit": "max_adapters", "wanted": 3000}),
    "user_id": ("/v1/users", {"email": "theirs@example.com", "role": "tenant_viewer"}),
}
"""Path parameter -> where its owner makes one, and with what body; when the document has it."""
MANAGED = ("/v1/keys", "/v1/users", "/v1/limit-requests", "/v1/audit")
"""Of the whole tenant; only a key with manage access changes it."""
NO_OWNER = {"delivery_id": "whd_" + "0" * 26, "number": "1", "alias": "live"}
"""Parameters that mean something only below another one."""


@pytest.fixture
def app(platform: Platform) -> FastAPI:
    install_engines(platform, {"ipc://fake": FakeEngine()})
    return create_app(platform=platform)


@pytest.fixture
def document(app: FastAPI) -> Document:
    return app.openapi()


@pytest.fixture
async def served(client: httpx.AsyncClient, platform: Platform) -> httpx.AsyncClient:
    """The client, once the engine has described its base model."""
    await platform.engines.refresh()
    return client


@pytest.fixture
async def owner(served: httpx.AsyncClient, platform: Platform) -> Tenant:
    """A tenant that has one of everything."""
    tenant = await make_tenant(platform, "owner")
    await make_ready_adapter(platform, tenant, "support")
    return tenant


async def managing_key(platform: Platform, tenant: Tenant) -> NewKey:
    """One that reaches every operation of /v1."""
    return await make_key(platform, tenant, access="manage")


async def owned_values(
    client: httpx.AsyncClient, document: Document, owner: NewKey
) -> dict[str, str]:
    """The owner's id for each path parameter of /v1."""
    values = {"name": "support", **NO_OWNER}
    for name, (path, body) in CREATED_BY_API.items():
        if path in document["paths"]:
            made = await client.post(path, json=body, headers=bearer(owner))
            assert made.status_code in (200, 201, 202), made.text
            values[name] = made.json()["id"]
    return values


def unknown_values(owned: Mapping[str, str]) -> dict[str, str]:
    """Ids of the same form and length that nobody has."""
    return {
        name: value if name in NO_OWNER else value[:4] + ("q" * 40)[: len(value) - 4]
        for name, value in owned.items()
    }


def seen(answer: httpx.Response, values: Mapping[str, str]) -> tuple[int, str, dict[str, str]]:
    """Status, body and headers, with the ids that were asked for taken out."""
    text = answer.text
    headers = {k: v for k, v in answer.headers.items() if k not in OWN_HEADERS}
    for value in values.values():
        if len(value) > 4:
            text = text.replace(value, UNKNOWN)
    return answer.status_code, text, headers


class TestAForeignTenant:
    async def test_cannot_tell_anothers_ids_from_unknown_ones_on_any_operation(
        self,
        served: httpx.AsyncClient,
        platform: Platform,
        document: Document,
        owner: Tenant,
    ) -> None:
        owned = await owned_values(served, document, await managing_key(platform, owner))
        foreign = bearer(await managing_key(platform, await make_tenant(platform)))
        unknown = unknown_values(owned)
        with_ids = [o for o in operations(document, "/v1/") if o.parameters]
        assert len(with_ids) >= 7
        for operation in with_ids:
            answers = [
                seen(await call(served, document, operation, Values(values), foreign), values)
                for values in (owned, unknown)
            ]
            assert answers[0] == answers[1], operation
            assert answers[0][0] == 404, (operation, answers[0])

    async def test_the_same_ids_are_found_by_their_owner(
        self,
        served: httpx.AsyncClient,
        platform: Platform,
        document: Document,
        owner: Tenant,
    ) -> None:
        """Without this, the test above could ask for nothing."""
        key = await managing_key(platform, owner)
        owned = await owned_values(served, document, key)
        for operation in operations(document, "/v1/"):
            if operation.reads and operation.parameters and "delivery_id" not in operation.path:
                answer = await call(served, document, operation, Values(owned), bearer(key))
                assert answer.status_code == 200, (operation, answer.text)

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
    @pytest.mark.parametrize("form", ["{name}", "{name}@live", "{name}@v1", "{id}"])
    async def test_calls_anothers_model_and_gets_what_no_model_gets(
        self,
        served: httpx.AsyncClient,
        platform: Platform,
        owner: Tenant,
        path: str,
        form: str,
    ) -> None:
        listed = await served.get("/v1/adapters", headers=bearer(await make_key(platform, owner)))
        adapter_id = listed.json()["data"][0]["id"]
        foreign = bearer(await make_key(platform, await make_tenant(platform)))
        prompt = {"prompt": "hi"}
        if "chat" in path:
            prompt = {"messages": [{"role": "user", "content": "hi"}]}  # type: ignore[dict-item]
        answers = []
        for name, id_ in (("support", adapter_id), ("suppork", adapter_id[:-4] + "qqqq")):
            model = form.format(name=name, id=id_)
            answer = await served.post(path, json={"model": model, **prompt}, headers=foreign)
            answers.append(seen(answer, {"model": model}))
        assert answers[0] == answers[1]
        assert answers[0][0] == 404

    async def test_is_never_asked_which_tenant_it_means(self, document: Document) -> None:
        """The tenant comes from the key: no parameter and no body of /v1 has one."""
        for operation in operations(document, "/v1/"):
            named = {entry["name"] for entry in operation.description.get("parameters", [])}
            bodies = json.dumps(operation.description.get("requestBody", {}))
            schemas = document["components"]["schemas"]
            for name in [n for n in schemas if f'schemas/{n}"' in bodies]:
                named |= set(schemas[name].get("properties", {}))
            assert not {n for n in named if "tenant" in n}, operation


class TestACredentialThatIsNotEnough:
    """Refused on every operation with the code that says why."""

    async def everywhere(
        self,
        client: httpx.AsyncClient,
        document: Document,
        headers: dict[str, str],
        *,
        prefix: str = "/v1/",
        only: Any = lambda _: True,
    ) -> set[tuple[int, str]]:
        found = set()
        for operation in operations(document, prefix):
            if not only(operation):
                continue
            values = Values(dict.fromkeys(operation.parameters, "1"))
            answer = await call(client, document, operation, values, headers)
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}, operation
            found.add((answer.status_code, error["code"]))
        return found

    async def test_an_expired_key(
        self,
        served: httpx.AsyncClient,
        platform: Platform,
        document: Document,
        clock: FrozenClock,
    ) -> None:
        at = clock.now() + timedelta(seconds=1)
        key = await make_key(platform, await make_tenant(platform), expires_at=at)
        clock.advance(seconds=1)
        found = await self.everywhere(served, document, bearer(key))
        assert found == {(401, "expired_api_key")}

    async def test_a_revoked_key(
        self, served: httpx.AsyncClient, platform: Platform, document: Document
    ) -> None:
        key = await make_key(platform, await make_tenant(platform))
        async with platform.db.transaction() as session:
            await keys.revoke_key(
                session, key.row.id, now=platform.clock.now(), actor="tests", tenant_id=None
            )
        found = await self.everywhere(served, document, bearer(key))
        assert found == {(401, "revoked_api_key")}

    async def test_a_key_of_a_suspended_tenant(
        self, served: httpx.AsyncClient, platform: Platform, document: Document
    ) -> None:
        key = await make_key(platform, await make_tenant(platform, suspended=True))
        found = await self.everywhere(served, document, bearer(key))
        assert found == {(403, "tenant_suspended")}

    async def test_a_key_of_a_deleted_tenant(
        self, served: httpx.AsyncClient, platform: Platform, document: Document
    ) -> None:
        tenant = await make_tenant(platform)
        key = await make_key(platform, tenant)
        async with platform.db.transaction() as session:
            await deletion.begin(
                session, tenant.id, confirm=tenant.name, now=platform.clock.now(), actor="tests"
            )
        found = await self.everywhere(served, document, bearer(key))
        assert found == {(401, "revoked_api_key")}

    async def test_a_key_from_another_network(
        self, served: httpx.AsyncClient, platform: Platform, document: Document
    ) -> None:
        key = await make_key(platform, await make_tenant(platform), networks=["203.0.113.0/24"])
        found = await self.everywhere(served, document, bearer(key))
        assert found == {(403, "network_not_allowed")}

    async def test_a_read_only_key_that_would_change_anything(
        self, served: httpx.AsyncClient, platform: Platform, document: Document
    ) -> None:
        key = await make_key(platform, await make_tenant(platform), access="read")
        found = await self.everywhere(
            served, document, bearer(key), only=lambda operation: not operation.reads
        )
        assert found == {(403, "read_only_key")}

    async def test_a_read_only_key_reads_on_every_operation_that_does(
        self,
        served: httpx.AsyncClient,
        platform: Platform,
        document: Document,
        owner: Tenant,
    ) -> None:
        owned = await owned_values(served, document, await managing_key(platform, owner))
        key = await make_key(platform, owner, access="read")
        for operation in operations(document, "/v1/"):
            if operation.reads and "delivery_id" not in operation.path:
                answer = await call(served, document, operation, Values(owned), bearer(key))
                assert answer.status_code == 200, (operation, answer.text)

    async def test_an_inference_key_beyond_models(
        self, served: httpx.AsyncClient, platform: Platform, document: Document
    ) -> None:
        key = await make_key(platform, await make_tenant(platform), access="inference")
        open_to_it = ("/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/limits")

        def closed(operation: Operation) -> bool:
            return not operation.path.startswith(open_to_it)

        found = await self.everywhere(served, document, bearer(key), only=closed)
        assert found == {(403, "inference_only_key")}

    async def test_a_full_key_that_would_change_keys_or_users(
        self, served: httpx.AsyncClient, platform: Platform, document: Document
    ) -> None:
        key = await make_key(platform, await make_tenant(platform))

        def managing(operation: Operation) -> bool:
            return operation.path.startswith(MANAGED) and not operation.reads

        found = await self.everywhere(served, document, bearer(key), only=managing)
        assert found == {(403, "manage_key_needed")}

    async def test_a_key_for_some_adapters_that_would_see_the_whole_tenant(
        self, served: httpx.AsyncClient, platform: Platform, document: Document, owner: Tenant
    ) -> None:
        key = await make_key(platform, owner, adapters=["support"])
        found = await self.everywhere(
            served, document, bearer(key), only=lambda o: o.path.startswith(MANAGED)
        )
        assert found == {(403, "key_scope")}

    async def test_a_read_only_operator_key_that_would_change_anything(
        self, served: httpx.AsyncClient, platform: Platform, document: Document
    ) -> None:
        key = await make_key(platform, None, access="read")
        found = await self.everywhere(
            served,
            document,
            bearer(key),
            prefix="/admin/v1/",
            only=lambda operation: not operation.reads,
        )
        assert found == {(403, "read_only_key")}

    @pytest.mark.parametrize("role", ["tenant_admin", "tenant_viewer"])
    async def test_a_tenants_session_on_the_operator_api(
        self, served: httpx.AsyncClient, platform: Platform, document: Document, role: Any
    ) -> None:
        user = await make_user(platform, await make_tenant(platform), role=role)
        served.cookies.update(await sign_in(platform, user))
        found = await self.everywhere(served, document, {}, prefix="/admin/v1/")
        assert found == {(403, "operator_only")}


async def test_what_a_scoped_key_may_not_call_is_a_404_and_an_audit_event(
    served: httpx.AsyncClient, platform: Platform, owner: Tenant
) -> None:
    key = bearer(await make_key(platform, owner, adapters=["other"]))
    chat = {"model": "support", "messages": [{"role": "user", "content": "hi"}]}
    answer = await served.post("/v1/chat/completions", json=chat, headers=key)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    operator = bearer(await make_key(platform, None))
    log = await served.get("/admin/v1/audit", params={"action": "authz_fail"}, headers=operator)
    (event,) = log.json()["data"]
    assert event["detail"] == {"reason": "adapter_scope"}
    assert event["tenant_id"] == owner.id


async def test_every_model_that_a_key_is_listed_answers_and_no_other_does(
    served: httpx.AsyncClient, platform: Platform, owner: Tenant
) -> None:
    """Over keys of every kind of scope."""
    await make_ready_adapter(platform, owner, "second", digest="d2" * 32)
    whole = await served.get("/v1/models", headers=bearer(await make_key(platform, owner)))
    every = {entry["id"] for entry in whole.json()["data"]}
    assert {"support", "support@v1", "second", "second@v1"} < every
    base = (every - {m for m in every if m.startswith(("support", "second"))}).pop()
    for scope in (None, ["support"], ["second", base], [base]):
        key = bearer(await make_key(platform, owner, adapters=scope, limits=KeyLimits()))
        listed = {m["id"] for m in (await served.get("/v1/models", headers=key)).json()["data"]}
        for model in every:
            chat = {
                "model": model,
                "messages": [{"role": "user", "content": "hi"}],
                "max_tokens": 1,
            }
            answer = await served.post("/v1/chat/completions", json=chat, headers=key)
            assert answer.status_code == (200 if model in listed else 404), (scope, model)
