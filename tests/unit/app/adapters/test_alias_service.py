"""Aliases over the API: set, promote, roll back, delete; their revisions and their history."""

import asyncio
from typing import Any

import httpx
import pytest

from app.adapters import repository, states
from app.adapters.live_alias import follow_live
from app.adapters.models import AdapterVersion
from app.audit import service as audit
from app.keys.service import NewKey
from app.platform import Platform
from app.tenants.models import Tenant
from tests.factories import bearer, make_key, make_tenant
from tests.serving import add_version, make_ready_adapter

PATH = "/v1/adapters/support/aliases"


@pytest.fixture
async def tenant(platform: Platform) -> Tenant:
    return await make_tenant(platform)


@pytest.fixture
async def key(platform: Platform, tenant: Tenant) -> NewKey:
    return await make_key(platform, tenant)


@pytest.fixture
async def versions(platform: Platform, tenant: Tenant) -> list[AdapterVersion]:
    """1, 2 and 3 are ready, 4 is still validated; `live` is on 1."""
    first = await make_ready_adapter(platform, tenant)
    others = [await add_version(platform, first, number) for number in (2, 3)]
    return [first, *others, await add_version(platform, first, 4, state="validating")]


class Api:
    """The aliases of `support`, as one caller moves them."""

    def __init__(self, client: httpx.AsyncClient, key: NewKey) -> None:
        self._client = client
        self._headers = bearer(key)

    async def send(
        self, method: str, path: str, body: object = None, **headers: str
    ) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self._client.request(
            method, f"{PATH}/{path}".rstrip("/"), json=body, headers=self._headers | named
        )

    async def put(self, alias: str, *targets: tuple[int, int], **headers: str) -> httpx.Response:
        body = {"targets": [{"version": v, "weight": w} for v, w in targets]}
        return await self.send("PUT", alias, body, **headers)

    async def promote(self, alias: str, version: int, **headers: str) -> httpx.Response:
        return await self.send("POST", f"{alias}/promote", {"version": version}, **headers)

    async def rollback(self, alias: str, body: object = None, **headers: str) -> httpx.Response:
        return await self.send("POST", f"{alias}/rollback", body, **headers)

    async def history(self, alias: str) -> list[dict[str, Any]]:
        answer = await self.send("GET", f"{alias}/history?limit=100")
        return list(answer.json()["data"])


@pytest.fixture
def api(client: httpx.AsyncClient, key: NewKey, versions: list[AdapterVersion]) -> Api:
    return Api(client, key)


def shares(answer: httpx.Response) -> dict[int, int]:
    assert answer.status_code == 200, answer.text
    return {target["version"]: target["weight"] for target in answer.json()["targets"]}


def refusal(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


class TestSetting:
    async def test_it_is_shown_as_it_was_set_with_its_revision_as_etag(self, api: Api) -> None:
        made = await api.put("canary", (1, 90), (2, 10))
        assert (shares(made), made.headers["etag"]) == ({1: 90, 2: 10}, '"1"')
        read = await api.send("GET", "canary")
        assert (read.json(), read.headers["etag"]) == (made.json(), '"1"')
        listed = (await api.send("GET", "")).json()["data"]
        assert [alias["alias"] for alias in listed] == ["canary", "live"]

    async def test_the_same_again_changes_nothing(self, api: Api) -> None:
        await api.put("canary", (1, 90), (2, 10))
        again = await api.put("canary", (2, 10), (1, 90))
        assert again.headers["etag"] == '"1"'
        assert len(await api.history("canary")) == 1

    async def test_of_two_admins_who_read_the_same_the_second_is_refused(self, api: Api) -> None:
        tag = (await api.put("canary", (1, 100))).headers["etag"]
        first, second = await asyncio.gather(
            api.put("canary", (1, 50), (2, 50), if_match=tag),
            api.put("canary", (1, 50), (3, 50), if_match=tag),
        )
        assert sorted([first.status_code, second.status_code]) == [200, 412]
        assert (await api.send("GET", "canary")).headers["etag"] == '"2"'

    async def test_if_none_match_only_makes_a_new_one(self, api: Api) -> None:
        assert (await api.put("canary", (1, 100), if_none_match="*")).status_code == 200
        again = await api.put("canary", (2, 100), if_none_match="*")
        assert refusal(again) == (412, "changed_meanwhile", "If-None-Match")

    @pytest.mark.parametrize(
        ("targets", "expected"),
        [
            ([(1, 50), (4, 50)], (409, "version_not_ready", "targets[1].version")),
            ([(9, 100)], (404, "version_not_found", "targets[0].version")),
            ([(1, 50), (2, 50), (1, 1)], (400, "invalid_alias_targets", "targets[2].version")),
            ([(1, 0), (2, 0)], (400, "invalid_alias_weights", "targets[0].weight")),
            ([(1, 101)], (400, "invalid_value", "targets[0].weight")),
        ],
    )
    async def test_what_cannot_be_honoured_names_the_field(
        self, api: Api, targets: list[tuple[int, int]], expected: tuple[int, str, str]
    ) -> None:
        assert refusal(await api.put("canary", *targets)) == expected
        assert (await api.send("GET", "canary")).status_code == 404


class TestPromoting:
    async def test_one_call_gives_the_target_everything_and_twice_is_once(self, api: Api) -> None:
        await api.put("canary", (1, 90), (2, 10))
        assert shares(await api.promote("canary", 2)) == {2: 100}
        again = await api.promote("canary", 2)
        assert (shares(again), again.headers["etag"]) == ({2: 100}, '"2"')

    async def test_only_a_target_can_be_promoted(self, api: Api) -> None:
        await api.put("canary", (1, 90), (2, 10))
        assert refusal(await api.promote("canary", 3)) == (409, "not_a_target", "version")
        assert refusal(await api.promote("nothing", 1)) == (404, "alias_not_found", "alias")

    async def test_a_stale_revision_promotes_nothing(self, api: Api) -> None:
        await api.put("canary", (1, 90), (2, 10))
        await api.put("canary", (1, 50), (2, 50))
        refused = await api.promote("canary", 2, if_match='"1"')
        assert refusal(refused) == (412, "changed_meanwhile", "If-Match")


class TestRollingBack:
    async def test_it_is_what_it_was_before_and_a_repeated_call_does_not_undo_it(
        self, api: Api
    ) -> None:
        await api.put("canary", (1, 90), (2, 10))
        await api.promote("canary", 2)
        for _ in range(3):
            back = await api.rollback("canary")
            assert (shares(back), back.headers["etag"]) == ({1: 90, 2: 10}, '"3"')
        await api.promote("canary", 2)
        assert shares(await api.rollback("canary")) == {1: 90, 2: 10}

    async def test_a_named_revision_goes_further_back(self, api: Api) -> None:
        await api.put("canary", (1, 100))
        await api.put("canary", (1, 50), (2, 50))
        await api.promote("canary", 2)
        for _ in range(2):
            assert shares(await api.rollback("canary", {"to_revision": 1})) == {1: 100}
        assert len(await api.history("canary")) == 4

    async def test_live_that_was_rolled_back_no_longer_follows_new_versions(
        self, api: Api, platform: Platform, tenant: Tenant, versions: list[AdapterVersion]
    ) -> None:
        new = versions[1]
        async with platform.db.transaction() as session:
            now = platform.clock.now()
            await follow_live(session, new.adapter_id, tenant.id, new.id, now)
        assert shares(await api.rollback("live")) == {1: 100}
        async with platform.db.transaction() as session:
            await follow_live(session, new.adapter_id, tenant.id, versions[2].id, now)
        assert shares(await api.send("GET", "live")) == {1: 100}

    @pytest.mark.parametrize(
        ("body", "expected"),
        [
            (None, (409, "nothing_to_roll_back", "to_revision")),
            ({"to_revision": 7}, (404, "revision_not_found", "to_revision")),
            ({"to_revision": 0}, (400, "invalid_value", "to_revision")),
            ({"to_revision": "1"}, (400, "invalid_value", "to_revision")),
        ],
    )
    async def test_where_there_is_nothing_to_go_back_to_it_says_so(
        self, api: Api, body: object, expected: tuple[int, str, str]
    ) -> None:
        await api.put("canary", (1, 100))
        answer = await api.rollback("canary", body)
        assert refusal(answer) == (expected[0], expected[1], expected[2])

    async def test_a_version_that_is_gone_meanwhile_is_not_gone_back_to(
        self, api: Api, platform: Platform, versions: list[AdapterVersion]
    ) -> None:
        await api.put("canary", (2, 100))
        await api.put("canary", (3, 100))
        async with platform.db.transaction() as session:
            now = platform.clock.now()
            await repository.move(session, versions[1].id, states.ERASED, now=now)
        refused = await api.rollback("canary")
        assert refusal(refused) == (404, "version_not_found", "to_revision")
        assert shares(await api.send("GET", "canary")) == {3: 100}


class TestTheHistory:
    async def test_it_tells_who_and_from_what_to_what_and_so_does_the_audit_log(
        self, api: Api, platform: Platform, tenant: Tenant, key: NewKey
    ) -> None:
        await api.put("canary", (1, 90), (2, 10))
        await api.promote("canary", 2)
        await api.rollback("canary")
        newest, *_, oldest = await api.history("canary")
        assert (newest["action"], newest["revision"], newest["by"]["id"]) == (
            "rollback",
            3,
            key.row.id,
        )
        assert newest["from"] == [{"version": 2, "weight": 100}]
        assert newest["to"] == [{"version": 1, "weight": 90}, {"version": 2, "weight": 10}]
        assert (oldest["action"], oldest["from"]) == ("set", None)
        async with platform.db.reading() as session:
            events = await audit.list_events(session, tenant_id=tenant.id)
        actions = [event.action for event in events if event.action.startswith("adapter.alias")]
        assert actions == ["adapter.alias_rollback", "adapter.alias_promote", "adapter.alias"]

    async def test_it_comes_in_pages_without_gap_or_repeat(self, api: Api) -> None:
        for version in (1, 2, 1, 2, 3):
            await api.put("canary", (version, 100))
        seen: list[int] = []
        path = "canary/history?limit=2"
        while True:
            page = (await api.send("GET", path)).json()
            seen += [change["revision"] for change in page["data"]]
            if not page["has_more"]:
                break
            path = f"canary/history?limit=2&before={page['next_before']}"
        assert seen == [5, 4, 3, 2, 1]

    async def test_it_outlives_the_alias_and_revisions_are_not_given_twice(self, api: Api) -> None:
        await api.put("canary", (1, 100))
        assert (await api.send("DELETE", "canary")).json()["deleted"] is True
        assert refusal(await api.send("GET", "canary")) == (404, "alias_not_found", "alias")
        assert refusal(await api.send("DELETE", "canary")) == (404, "alias_not_found", "alias")
        assert (await api.history("canary"))[0]["to"] is None
        stale = await api.put("canary", (2, 100), if_match='"1"')
        assert stale.status_code == 412
        assert (await api.put("canary", (2, 100))).headers["etag"] == '"3"'

    async def test_deleting_live_hands_it_back_to_the_newest_version(self, api: Api) -> None:
        await api.put("live", (1, 100))
        assert (await api.send("DELETE", "live")).status_code == 200
        live = await api.send("GET", "live")
        assert (shares(live), live.json()["by_hand"]) == ({3: 100}, False)


class TestOtherTenants:
    ROUTES = [
        ("GET", "", None),
        ("GET", "canary", None),
        ("GET", "canary/history", None),
        ("PUT", "canary", {"targets": [{"version": 1, "weight": 100}]}),
        ("DELETE", "canary", None),
        ("POST", "canary/promote", {"version": 1}),
        ("POST", "canary/rollback", {}),
    ]

    async def test_a_foreign_adapters_alias_is_an_unknown_one(
        self, api: Api, client: httpx.AsyncClient, platform: Platform
    ) -> None:
        await api.put("canary", (1, 90), (2, 10))
        key = await make_key(platform, await make_tenant(platform))
        for method, path, body in self.ROUTES:
            foreign, unknown = [
                await client.request(
                    method,
                    f"/v1/adapters/{name}/aliases/{path}".rstrip("/"),
                    json=body,
                    headers=bearer(key),
                )
                for name in ("support", "nothing")
            ]
            assert foreign.status_code == unknown.status_code == 404, path
            assert foreign.text.replace("support", "nothing") == unknown.text
        assert len(await api.history("canary")) == 1
