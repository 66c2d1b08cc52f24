"""Lists, aliases, events and erasure over HTTP, and what operators see."""

import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy.exc import SQLAlchemyError

from app.adapters import events, validation
from app.adapters.tasks import sweep
from app.keys.service import NewKey
from app.platform import Platform
from app.tenants.models import Tenant
from tests.adapter_files import good_adapter, tiny_description
from tests.factories import bearer, make_key, make_tenant
from tests.serving import add_version, make_ready_adapter
from tests.validation_bench import Bench, make_bench, post_upload

BASE = tiny_description()


@pytest.fixture
async def bench(app: FastAPI) -> Bench:
    return await make_bench(app)


@pytest.fixture
async def tenant(platform: Platform) -> Tenant:
    return await make_tenant(platform)


@pytest.fixture
async def key(platform: Platform, tenant: Tenant) -> NewKey:
    return await make_key(platform, tenant)


async def upload(
    client: httpx.AsyncClient, key: NewKey, name: str = "a", seed: int = 0
) -> dict[str, str]:
    response = await post_upload(client, key, good_adapter(BASE, seed=seed), name)
    assert response.status_code == 202, response.text
    return dict(response.json())


class TestLists:
    async def test_pages_follow_each_other_without_gap_or_repeat(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        names = [f"a{n}" for n in range(5)]
        for name in names:
            await upload(client, key, name)
        seen: list[str] = []
        params: dict[str, str] = {"limit": "2"}
        while True:
            page = (await client.get("/v1/adapters", params=params, headers=bearer(key))).json()
            seen += [adapter["name"] for adapter in page["data"]]
            if not page["has_more"]:
                break
            params["after"] = page["last_id"]
        assert seen == names

    @pytest.mark.parametrize("limit", ["0", "101", "x", "-1"])
    async def test_a_limit_out_of_range_names_the_field(
        self, limit: str, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        answer = await client.get("/v1/adapters", params={"limit": limit}, headers=bearer(key))
        assert 400 <= answer.status_code < 500
        assert answer.json()["error"]["param"] == "limit"

    async def test_operators_see_every_tenants_adapters_and_tenants_do_not_see_that_list(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench, platform: Platform
    ) -> None:
        other = await make_key(platform, await make_tenant(platform))
        await upload(client, key, "a")
        await upload(client, other, "b")
        operator = await make_key(platform, None)
        answer = await client.get("/admin/v1/adapters", headers=bearer(operator))
        assert [adapter["name"] for adapter in answer.json()["data"]] == ["a", "b"]
        one = await client.get(
            "/admin/v1/adapters",
            params={"tenant": other.row.tenant_id},
            headers=bearer(operator),
        )
        assert [adapter["name"] for adapter in one.json()["data"]] == ["b"]
        refused = await client.get("/admin/v1/adapters", headers=bearer(key))
        assert refused.status_code == 403

    async def test_an_operator_validates_a_failed_version_again(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench, platform: Platform
    ) -> None:
        version = await upload(client, key)
        operator = await make_key(platform, None)
        path = f"/admin/v1/adapters/versions/{version['id']}"
        refused = await client.post(f"{path}/validate", headers=bearer(operator))
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            409,
            "version_not_failed",
        )
        bench.queue.messages.clear()
        for _ in range(platform.settings.validation_attempts):
            await validation._claim(bench.resources, version["id"])
            platform.clock.advance(  # type: ignore[attr-defined]
                seconds=platform.settings.validation_lease_s + 1
            )
            await sweep(bench.resources)
        bench.queue.messages.clear()
        shown = await client.get(path, headers=bearer(operator))
        assert shown.json()["state"] == "failed"
        again = await client.post(f"{path}/validate", headers=bearer(operator))
        assert (again.status_code, again.json()["state"]) == (200, "uploaded")
        assert await bench.work() == ["ready"]


class TestAliases:
    @pytest.fixture
    async def ready(self, platform: Platform, tenant: Tenant, bench: Bench) -> None:
        """Versions 1 and 2 are ready, 3 waits."""
        first = await make_ready_adapter(platform, tenant, "a")
        await add_version(platform, first, 2)
        await add_version(platform, first, 3, state="uploaded")

    async def put(
        self, client: httpx.AsyncClient, key: NewKey, alias: str, *targets: tuple[int, int]
    ) -> httpx.Response:
        body = {"targets": [{"version": v, "weight": w} for v, w in targets]}
        return await client.put(f"/v1/adapters/a/aliases/{alias}", json=body, headers=bearer(key))

    async def test_a_canary_is_shown_as_it_was_set(
        self, client: httpx.AsyncClient, key: NewKey, ready: None
    ) -> None:
        answer = await self.put(client, key, "canary", (1, 90), (2, 10))
        assert answer.status_code == 200
        adapter = (await client.get("/v1/adapters/a", headers=bearer(key))).json()
        aliases = {alias["alias"]: alias["targets"] for alias in adapter["aliases"]}
        assert aliases["canary"] == [{"version": 1, "weight": 90}, {"version": 2, "weight": 10}]

    @pytest.mark.parametrize(
        ("alias", "targets", "status", "code"),
        [
            ("live", [(1, 90)], 400, "invalid_alias_weights"),
            ("live", [(1, 50), (1, 50)], 400, "invalid_alias_targets"),
            ("live", [(3, 100)], 409, "version_not_ready"),
            ("live", [(9, 100)], 404, "version_not_found"),
            ("v2", [(1, 100)], 400, "invalid_alias_name"),
            ("A", [(1, 100)], 400, "invalid_alias_name"),
        ],
    )
    async def test_what_cannot_be_honoured_is_refused_by_name(
        self,
        alias: str,
        targets: list[tuple[int, int]],
        status: int,
        code: str,
        client: httpx.AsyncClient,
        key: NewKey,
        ready: None,
    ) -> None:
        answer = await self.put(client, key, alias, *targets)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)

    @pytest.mark.parametrize(
        "body",
        [
            {},
            {"targets": []},
            {"targets": [{"version": "1", "weight": 100}]},
            {"targets": [{"version": 1.5, "weight": 100}]},
            {"targets": [{"version": 1, "weight": 100, "extra": 1}]},
            {"targets": [{"version": 2**40, "weight": 100}]},
        ],
    )
    async def test_a_malformed_body_names_the_field(
        self, body: object, client: httpx.AsyncClient, key: NewKey, ready: None
    ) -> None:
        answer = await client.put("/v1/adapters/a/aliases/live", json=body, headers=bearer(key))
        assert 400 <= answer.status_code < 500
        assert answer.json()["error"]["param"].startswith("targets")


class TestEvents:
    def frames(self, text: str) -> list[tuple[str, dict[str, object]]]:
        found = []
        for block in text.strip().split("\n\n"):
            event, data = block.split("\n")
            found.append((event.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        return found

    async def test_a_finished_version_is_told_at_once_and_the_stream_ends(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        await upload(client, key)
        await bench.work()
        answer = await client.get("/v1/adapters/a/versions/1/events", headers=bearer(key))
        assert answer.headers["content-type"].startswith("text/event-stream")
        frames = self.frames(answer.text)
        assert [event for event, _ in frames] == ["state", *["check"] * 5, "done"]
        assert frames[-1][1]["state"] == "ready"

    async def test_changes_are_told_as_they_come_and_each_once(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        version = await upload(client, key)
        stream = events.version_events(bench.resources, version["id"], poll_s=0.0)
        first = self.frames((await anext(stream)).decode())
        assert [(event, data["state"]) for event, data in first] == [("state", "uploaded")]
        claim = await validation._claim(bench.resources, version["id"])
        assert claim is not None
        second = self.frames((await anext(stream)).decode())
        assert [(event, data["state"]) for event, data in second] == [("state", "validating")]
        await validation._check(bench.resources, claim)
        third = self.frames((await anext(stream)).decode())
        assert [data["group"] for _, data in third] == [
            "container",
            "config",
            "coverage",
            "numbers",
            "behaviour",
        ]
        await client.delete("/v1/adapters/a", headers=bearer(key))
        last = self.frames((await anext(stream)).decode())
        assert [event for event, _ in last] == ["state", "done"]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    async def test_a_database_that_is_away_for_a_while_does_not_cut_it_off(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        version = await upload(client, key)
        stream = events.version_events(bench.resources, version["id"], poll_s=0.0)
        await anext(stream)
        read, away = events._read, iter([OSError(), SQLAlchemyError()])

        async def sometimes(*arguments: Any) -> Any:
            if (error := next(away, None)) is not None:
                raise error
            return await read(*arguments)

        monkeypatch.setattr(events, "_read", sometimes)
        await bench.work()
        frames = self.frames((await anext(stream)).decode())
        assert frames[-1][0] == "done"


class TestErasure:
    async def test_a_deleted_adapter_is_gone_everywhere_and_the_receipt_says_so(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        version = await upload(client, key)
        await bench.work()
        answer = await client.delete("/v1/adapters/a", headers=bearer(key))
        assert answer.status_code == 200
        receipt = answer.json()
        assert receipt["complete"] is True
        assert "ackups" in receipt["backups"]
        [item] = receipt["items"]
        assert (item["disk"], item["digest"]) == ("erased", version["digest"])
        assert item["engines"] == [
            {"engine": "engine-0", "device": "erased", "host": "erased", "prefix_cache": "erased"}
        ]
        assert [ref.digest for ref in bench.engine.forgotten] == [version["digest"]]
        assert list(bench.resources.store.refs()) == []
        gone = await client.get("/v1/adapters/a", headers=bearer(key))
        assert gone.status_code == 404
        twice = await client.delete("/v1/adapters/a", headers=bearer(key))
        assert twice.status_code == 404

    async def test_an_engine_that_is_away_stays_pending_until_the_sweep_reaches_it(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench, platform: Platform
    ) -> None:
        await upload(client, key)
        bench.engine.away = True
        answer = await client.delete("/v1/adapters/a", headers=bearer(key))
        assert answer.status_code == 202
        [item] = answer.json()["items"]
        assert (item["disk"], item["engines"][0]["device"]) == ("erased", "pending")
        assert await sweep(bench.resources) == "0 validations sent, 1 erasures pending"
        bench.engine.away = False
        assert await sweep(bench.resources) == "0 validations sent, 0 erasures pending"
        assert len(bench.engine.forgotten) == 1

    @pytest.mark.parametrize(("loading", "status"), [(2, 200), (1000, 202)])
    async def test_an_engine_that_is_loading_it_is_asked_again(
        self, loading: int, status: int, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        await upload(client, key)
        bench.engine.loading = loading
        answer = await client.delete("/v1/adapters/a", headers=bearer(key))
        assert answer.status_code == status
        assert answer.json()["complete"] is (status == 200)

    async def test_content_that_another_version_has_is_kept_for_it(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        await upload(client, key, "a")
        kept = await upload(client, key, "b")
        receipt = (await client.delete("/v1/adapters/a", headers=bearer(key))).json()
        [item] = receipt["items"]
        assert (item["disk"], item["kept_for"], item["engines"]) == ("kept", [kept["id"]], [])
        assert bench.engine.forgotten == []
        assert await bench.work() == ["nothing to do", "ready"]

    async def test_one_version_goes_and_live_moves_to_the_newest_that_is_left(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        for seed in (1, 2):
            await upload(client, key, "a", seed)
        await bench.work()
        answer = await client.delete("/v1/adapters/a/versions/2", headers=bearer(key))
        assert answer.status_code == 200
        adapter = (await client.get("/v1/adapters/a", headers=bearer(key))).json()
        assert [version["version"] for version in adapter["versions"]] == [1]
        assert adapter["aliases"][0]["targets"] == [{"version": 1, "weight": 100}]
        again = await upload(client, key, "a", 2)
        assert again["version"] == 3

    async def test_a_version_under_an_alias_set_by_hand_is_not_taken_away(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        await upload(client, key)
        await bench.work()
        body = {"targets": [{"version": 1, "weight": 100}]}
        await client.put("/v1/adapters/a/aliases/stable", json=body, headers=bearer(key))
        refused = await client.delete("/v1/adapters/a/versions/1", headers=bearer(key))
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "version_in_use")
        assert (await client.delete("/v1/adapters/a", headers=bearer(key))).status_code == 200

    async def test_a_validation_in_progress_ends_without_a_verdict(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        version = await upload(client, key)
        claim = await validation._claim(bench.resources, version["id"])
        assert claim is not None
        await client.delete("/v1/adapters/a", headers=bearer(key))
        with pytest.raises(validation.LeaseLost):
            await validation._renew(bench.resources, claim)
        assert await bench.work() == ["nothing to do"]
