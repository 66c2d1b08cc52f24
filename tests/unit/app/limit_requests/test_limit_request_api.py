"""/v1/limit-requests and /admin/v1/limit-requests: a tenant asks, an operator answers."""

from typing import Any

import httpx
import pytest

from app.audit import service as audit
from app.limit_requests.service import MOST_A_DAY, REQUESTABLE
from app.platform import Platform
from app.tenants.models import Tenant
from app.tenants.service import find_tenant
from tests.factories import bearer, make_key, make_tenant

OWN, ALL = "/v1/limit-requests", "/admin/v1/limit-requests"
ASKED = {"limit": "requests_per_minute", "wanted": 600, "reason": "a launch"}


@pytest.fixture
async def tenant(platform: Platform) -> Tenant:
    return await make_tenant(platform, requests_per_minute=60)


@pytest.fixture
async def manager(platform: Platform, tenant: Tenant) -> dict[str, str]:
    return bearer(await make_key(platform, tenant, access="manage"))


@pytest.fixture
async def operator(platform: Platform) -> dict[str, str]:
    return bearer(await make_key(platform, None, name="ops"))


def refusal(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


async def ask(client: httpx.AsyncClient, headers: dict[str, str], **changes: Any) -> str:
    answer = await client.post(OWN, json=ASKED | changes, headers=headers)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


async def limit_of(platform: Platform, tenant: Tenant, name: str) -> Any:
    async with platform.db.reading() as session:
        return getattr(await find_tenant(session, tenant.id), name)


async def actions(platform: Platform, tenant: Tenant) -> list[str]:
    async with platform.db.reading() as session:
        events = await audit.list_events(session, tenant_id=tenant.id)
    return [event.action for event in events if event.action.startswith("limits.")]


class TestATenant:
    async def test_asks_lists_withdraws_and_asks_again(
        self,
        client: httpx.AsyncClient,
        platform: Platform,
        tenant: Tenant,
        manager: dict[str, str],
    ) -> None:
        made = (await client.post(OWN, json=ASKED, headers=manager)).json()
        assert (made["current"], made["wanted"], made["granted"]) == (60, 600, None)
        assert isinstance(made["wanted"], int)
        assert (made["state"], made["reason"], made["answer"]) == ("open", "a launch", "")
        assert refusal(await client.post(OWN, json=ASKED, headers=manager)) == (
            409,
            "limit_request_open",
            "limit",
        )
        withdrawn = await client.post(f"{OWN}/{made['id']}/withdraw", headers=manager)
        assert withdrawn.json()["state"] == "withdrawn"
        again = await client.post(f"{OWN}/{made['id']}/withdraw", headers=manager)
        assert refusal(again) == (409, "limit_request_decided", None)
        second = await ask(client, manager)
        listed = (await client.get(OWN, headers=manager)).json()["data"]
        assert [row["id"] for row in listed] == [second, made["id"]]
        waiting = (await client.get(OWN, params={"state": "open"}, headers=manager)).json()
        assert [row["id"] for row in waiting["data"]] == [second]
        assert await limit_of(platform, tenant, "requests_per_minute") == 60
        assert await actions(platform, tenant) == [
            "limits.request",
            "limits.withdraw",
            "limits.request",
        ]

    async def test_asks_once_with_one_idempotency_key(
        self, client: httpx.AsyncClient, manager: dict[str, str]
    ) -> None:
        headers = manager | {"Idempotency-Key": "once"}
        answers = [await client.post(OWN, json=ASKED, headers=headers) for _ in range(2)]
        assert answers[0].json() == answers[1].json()

    async def test_asks_a_few_times_a_day_also_where_it_withdrew(
        self, client: httpx.AsyncClient, manager: dict[str, str]
    ) -> None:
        for name in REQUESTABLE[:MOST_A_DAY]:
            path = f"{OWN}/{await ask(client, manager, limit=name, wanted=7)}"
            await client.post(f"{path}/withdraw", headers=manager)
        answer = await client.post(OWN, json=ASKED | {"wanted": 8}, headers=manager)
        assert refusal(answer)[:2] == (429, "too_many_requests_for_limits")

    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"limit": "weight"}, "limit"),
            ({"wanted": 2.5}, "wanted"),
            ({"wanted": 0}, "wanted"),
            ({"wanted": "600"}, "wanted"),
            ({"wanted": True}, "wanted"),
            ({"wanted": 2**40}, "wanted"),
            ({"wanted": 60}, "wanted"),  # as it is
            ({"reason": "x" * 501}, "reason"),
            ({"reason": "\0"}, "reason"),
            ({"tenant_id": "ten_x"}, "tenant_id"),
        ],
    )
    async def test_is_refused_by_the_fields_name(
        self,
        client: httpx.AsyncClient,
        manager: dict[str, str],
        changes: dict[str, Any],
        field: str,
    ) -> None:
        answer = await client.post(OWN, json=ASKED | changes, headers=manager)
        assert answer.status_code in (400, 422)
        assert answer.json()["error"]["param"] == field

    async def test_sees_its_own_alone(
        self, client: httpx.AsyncClient, platform: Platform, manager: dict[str, str]
    ) -> None:
        request_id = await ask(client, manager)
        other = bearer(await make_key(platform, await make_tenant(platform), access="manage"))
        assert (await client.get(OWN, headers=other)).json()["data"] == []
        assert (await client.get(f"{OWN}/{request_id}", headers=other)).status_code == 404
        withdrawn = await client.post(f"{OWN}/{request_id}/withdraw", headers=other)
        assert withdrawn.status_code == 404
        assert (await client.get(f"{OWN}/{request_id}", headers=manager)).json()["state"] == "open"


class TestAnOperator:
    async def test_approves_what_was_asked_and_it_holds_for_the_next_call(
        self,
        client: httpx.AsyncClient,
        platform: Platform,
        tenant: Tenant,
        manager: dict[str, str],
        operator: dict[str, str],
    ) -> None:
        request_id = await ask(client, manager)
        (listed,) = (await client.get(ALL, params={"state": "open"}, headers=operator)).json()[
            "data"
        ]
        assert (listed["id"], listed["tenant_id"]) == (request_id, tenant.id)
        path = f"{ALL}/{request_id}"
        answer = await client.post(f"{path}/approve", headers=operator)
        assert (answer.json()["state"], answer.json()["granted"]) == ("approved", 600)
        windows = (await client.get("/v1/limits", headers=manager)).json()["per_minute"]
        assert {"requests": 600}.items() <= {w["name"]: w["limit"] for w in windows}.items()
        for verb, body in (("approve", None), ("decline", {"answer": "no"})):
            again = await client.post(f"{path}/{verb}", json=body, headers=operator)
            assert refusal(again) == (409, "limit_request_decided", None)
        late = await client.post(f"{OWN}/{request_id}/withdraw", headers=manager)
        assert refusal(late) == (409, "limit_request_decided", None)
        assert await actions(platform, tenant) == ["limits.approve", "limits.request"]

    async def test_approves_less_than_was_asked_with_a_word_to_the_tenant(
        self,
        client: httpx.AsyncClient,
        platform: Platform,
        tenant: Tenant,
        manager: dict[str, str],
        operator: dict[str, str],
    ) -> None:
        request_id = await ask(client, manager)
        body = {"value": 300, "answer": "as far as the machine goes"}
        path = f"{ALL}/{request_id}/approve"
        assert (await client.post(path, json=body, headers=operator)).status_code == 200
        assert await limit_of(platform, tenant, "requests_per_minute") == 300
        seen = (await client.get(f"{OWN}/{request_id}", headers=manager)).json()
        assert (seen["wanted"], seen["granted"], seen["answer"]) == (600, 300, body["answer"])
        assert "decided_by" not in seen

    @pytest.mark.parametrize("value", [0, 2.5, 2**40, "300"])
    async def test_cannot_set_what_the_limit_cannot_be(
        self,
        client: httpx.AsyncClient,
        platform: Platform,
        tenant: Tenant,
        manager: dict[str, str],
        operator: dict[str, str],
        value: Any,
    ) -> None:
        path = f"{ALL}/{await ask(client, manager)}"
        answer = await client.post(f"{path}/approve", json={"value": value}, headers=operator)
        assert answer.json()["error"]["param"] == "value"
        assert (await client.get(path, headers=operator)).json()["state"] == "open"
        assert await limit_of(platform, tenant, "requests_per_minute") == 60

    @pytest.mark.parametrize("answer", ["", " "])
    async def test_declines_with_a_reason_alone(
        self,
        client: httpx.AsyncClient,
        platform: Platform,
        tenant: Tenant,
        manager: dict[str, str],
        operator: dict[str, str],
        answer: str,
    ) -> None:
        path = f"{ALL}/{await ask(client, manager)}"
        refused = await client.post(f"{path}/decline", json={"answer": answer}, headers=operator)
        assert refused.json()["error"]["param"] == "answer"
        body = {"answer": "the machine is full"}
        declined = await client.post(f"{path}/decline", json=body, headers=operator)
        assert (declined.json()["state"], declined.json()["decided_by"] is None) == (
            "declined",
            False,
        )
        assert await limit_of(platform, tenant, "requests_per_minute") == 60
        assert await actions(platform, tenant) == ["limits.decline", "limits.request"]

    async def test_of_an_unknown_request_is_told_so(
        self, client: httpx.AsyncClient, operator: dict[str, str]
    ) -> None:
        for verb in ("approve", "decline"):
            path = f"{ALL}/lrq_none/{verb}"
            answer = await client.post(path, json={"answer": "no"}, headers=operator)
            assert answer.status_code == 404
