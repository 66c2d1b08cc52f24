"""A version after its verdict: archived and back, a base model that changes, work that is lost."""

import asyncio
from dataclasses import replace
from datetime import timedelta

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import select

from app.adapters import base_change, run_repository, validation
from app.adapters.models import ValidationRun
from app.adapters.probes import Engine
from app.adapters.tasks import follow_base, sweep, validate_version
from app.clock import FrozenClock
from app.errors import NotFound
from app.keys.service import NewKey
from app.platform import Platform
from app.settings import Settings
from app.tenants.models import Tenant
from engine.errors import EngineUnavailable, StoreUnavailable
from engine.types import AdapterRef
from tests.adapter_files import good_adapter, tiny_description
from tests.factories import bearer, make_caller, make_key, make_tenant
from tests.upload_parts import error_of
from tests.validation_bench import Bench, ProbedEngine, make_bench, post_upload

BASE = tiny_description()
OTHER_BASE = replace(BASE, base_digest="d" * 64)


@pytest.fixture
def database_url(any_database_url: str) -> str:
    return any_database_url


@pytest.fixture
async def bench(app: FastAPI) -> Bench:
    return await make_bench(app)


@pytest.fixture
async def tenant(platform: Platform) -> Tenant:
    return await make_tenant(platform)


@pytest.fixture
async def key(platform: Platform, tenant: Tenant) -> NewKey:
    return await make_key(platform, tenant)


@pytest.fixture
async def operator(platform: Platform) -> dict[str, str]:
    return bearer(await make_key(platform, None))


async def ready(client: httpx.AsyncClient, key: NewKey, bench: Bench, seed: int = 0) -> str:
    response = await post_upload(client, key, good_adapter(BASE, seed=seed), "a")
    assert await bench.work() == ["ready"]
    return str(response.json()["id"])


async def act(
    client: httpx.AsyncClient, key: NewKey, action: str, number: int = 1
) -> httpx.Response:
    return await client.post(f"/v1/adapters/a/versions/{number}/{action}", headers=bearer(key))


async def state(client: httpx.AsyncClient, key: NewKey, number: int = 1) -> dict[str, object]:
    return dict((await client.get(f"/v1/adapters/a/versions/{number}", headers=bearer(key))).json())


async def called(platform: Platform, tenant: Tenant, model: str = "a") -> str:
    """`ok`, or the code and sentence of the refusal."""
    try:
        await platform.names.for_call(make_caller(platform, tenant), model, request_id="req_1")
    except NotFound as refusal:
        return f"{refusal.code}: {refusal.message}"
    return "ok"


class TestArchiving:
    async def test_an_archived_version_is_not_served_and_comes_back_without_an_upload(
        self,
        client: httpx.AsyncClient,
        key: NewKey,
        bench: Bench,
        platform: Platform,
        tenant: Tenant,
    ) -> None:
        await ready(client, key, bench)
        assert (await act(client, key, "archive")).json()["state"] == "archived"
        refused = await called(platform, tenant, "a@v1")
        assert refused.startswith("version_archived: ")
        assert "unarchive" in refused
        assert (await called(platform, tenant)).startswith("version_archived: ")
        assert len(list(bench.resources.store.refs())) == 1
        back = await act(client, key, "unarchive")
        assert (back.status_code, back.json()["state"]) == (200, "ready")
        assert await called(platform, tenant) == "ok"
        assert bench.queue.messages == []

    async def test_live_moves_to_the_newest_version_that_is_ready(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench, platform: Platform
    ) -> None:
        await ready(client, key, bench, 1)
        await ready(client, key, bench, 2)
        await act(client, key, "archive", 2)
        adapter = (await client.get("/v1/adapters/a", headers=bearer(key))).json()
        assert adapter["aliases"][0]["targets"] == [{"version": 1, "weight": 100}]
        await act(client, key, "unarchive", 2)
        adapter = (await client.get("/v1/adapters/a", headers=bearer(key))).json()
        assert adapter["aliases"][0]["targets"] == [{"version": 2, "weight": 100}]

    async def test_an_alias_set_by_hand_is_not_moved_behind_anybodys_back(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        await ready(client, key, bench)
        targets = {"targets": [{"version": 1, "weight": 100}]}
        await client.put("/v1/adapters/a/aliases/prod", json=targets, headers=bearer(key))
        assert error_of(await act(client, key, "archive")) == (409, "version_in_use", "version")

    async def test_twice_is_once(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        await ready(client, key, bench)
        for action, expected in (("archive", "archived"), ("unarchive", "ready")):
            for _ in "12":
                answer = await act(client, key, action)
                assert (answer.status_code, answer.json()["state"]) == (200, expected)

    async def test_only_what_was_ready_can_be_archived(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        await post_upload(client, key, good_adapter(BASE), "a")
        for action, code in (
            ("archive", "version_not_ready"),
            ("unarchive", "version_not_archived"),
        ):
            assert error_of(await act(client, key, action)) == (409, code, "version")

    async def test_an_archived_version_can_be_erased(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        await ready(client, key, bench)
        await act(client, key, "archive")
        receipt = await client.delete("/v1/adapters/a/versions/1", headers=bearer(key))
        assert [item["disk"] for item in receipt.json()["items"]] == ["erased"]


async def test_a_call_straight_after_the_ready_event_is_answered(
    client: httpx.AsyncClient, key: NewKey, bench: Bench, platform: Platform, tenant: Tenant
) -> None:
    await post_upload(client, key, good_adapter(BASE), "a")

    async def call_when_told() -> str:
        events = await client.get("/v1/adapters/a/versions/1/events", headers=bearer(key))
        assert "event: done" in events.text
        return await called(platform, tenant)

    told = asyncio.create_task(call_when_told())
    assert await bench.work() == ["ready"]
    assert await told == "ok"


class TestAnotherBaseModel:
    async def test_what_depends_on_the_old_one_is_refused_by_name_until_it_is_validated_again(
        self,
        client: httpx.AsyncClient,
        key: NewKey,
        bench: Bench,
        platform: Platform,
        tenant: Tenant,
        operator: dict[str, str],
    ) -> None:
        await ready(client, key, bench)
        bench.engine.description = OTHER_BASE
        await follow_base(bench.resources)
        due = await state(client, key)
        assert (due["state"], due["code"]) == ("uploaded", "base_changed")
        for model in ("a", "a@v1"):
            refused = await called(platform, tenant, model)
            assert refused.startswith("version_base_changed: ")
            assert "base model was changed" in refused
        progress = await client.get("/admin/v1/adapters/validations", headers=operator)
        assert progress.json()["counts"]["base_changed"] == 1
        assert await bench.work() == ["ready"]
        again = await state(client, key)
        assert (again["state"], again["code"]) == ("ready", None)
        assert again["base_digest"] == OTHER_BASE.base_digest
        assert await called(platform, tenant) == "ok"
        progress = await client.get("/admin/v1/adapters/validations", headers=operator)
        assert progress.json()["counts"]["base_changed"] == 0

    async def test_what_no_longer_fits_is_rejected(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        await ready(client, key, bench)
        bench.engine.description = replace(tiny_description(hidden=32, kv=16), base_digest="e" * 64)
        await follow_base(bench.resources)
        assert await bench.work() == ["rejected"]
        assert (await state(client, key))["code"] == "shape_mismatch"

    async def test_what_the_old_base_rejected_may_be_sent_again(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench, clock: FrozenClock
    ) -> None:
        files = good_adapter(tiny_description(hidden=32, kv=16))
        await post_upload(client, key, files, "a")
        assert await bench.work() == ["rejected"]
        assert (await post_upload(client, key, files, "a")).status_code == 200
        clock.advance(seconds=60)
        bench.engine.description = replace(tiny_description(hidden=32, kv=16), base_digest="e" * 64)
        await follow_base(bench.resources)
        assert (await post_upload(client, key, files, "a")).status_code == 202
        assert await bench.work() == ["ready"]

    async def test_the_same_base_and_an_engine_that_is_away_change_nothing(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        await ready(client, key, bench)
        await follow_base(bench.resources)
        bench.engine.away = True
        await follow_base(bench.resources)
        assert (await state(client, key))["state"] == "ready"

    async def test_a_base_whose_engine_restarts_beside_another_is_waited_for(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench, clock: FrozenClock
    ) -> None:
        await ready(client, key, bench)
        bench.engine.away = True
        engines: list[Engine] = [bench.engine, ProbedEngine(OTHER_BASE)]
        resources = replace(bench.resources, engines=engines)
        await follow_base(resources)
        assert (await state(client, key))["state"] == "ready"
        clock.advance(seconds=base_change.GONE_AFTER.total_seconds() + 1)
        await follow_base(resources)
        assert (await state(client, key))["code"] == "base_changed"

    async def test_with_both_bases_served_nothing_is_due(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        await ready(client, key, bench)
        engines: list[Engine] = [ProbedEngine(OTHER_BASE), bench.engine]
        await follow_base(replace(bench.resources, engines=engines))
        assert (await state(client, key))["state"] == "ready"

    async def test_an_archived_version_is_validated_when_it_comes_back(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench, clock: FrozenClock
    ) -> None:
        await ready(client, key, bench)
        await act(client, key, "archive")
        clock.advance(seconds=timedelta(hours=1).total_seconds())
        bench.engine.description = OTHER_BASE
        await follow_base(bench.resources)
        assert (await state(client, key))["state"] == "archived"
        back = await act(client, key, "unarchive")
        assert (back.json()["state"], back.json()["code"]) == ("uploaded", "base_changed")
        assert await bench.work() == ["ready"]

    async def test_looking_twice_queues_once(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        await ready(client, key, bench)
        bench.engine.description = OTHER_BASE
        for _ in "123":
            await follow_base(bench.resources)
        assert len(bench.queue.messages) == 1


class TestWorkThatIsLost:
    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        return settings.model_copy(update={"validation_lease_s": 0.15})

    async def test_a_worker_that_lives_keeps_its_lease_however_long_a_check_takes(
        self,
        client: httpx.AsyncClient,
        key: NewKey,
        bench: Bench,
        clock: FrozenClock,
        platform: Platform,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        version_id = (await post_upload(client, key, good_adapter(BASE), "a")).json()["id"]

        async def long_check(*_: object) -> object:
            for _ in range(8):  # far beyond the lease, as the database's clock sees it
                await asyncio.sleep(0.06)
                clock.advance(seconds=0.06)
                await sweep(bench.resources)
                assert await validation._claim(bench.resources, version_id) is None
            raise validation.NoVerdict("engine_unavailable", "enough", counts=False)

        monkeypatch.setattr(validation, "_check", long_check)
        assert await validate_version(bench.resources, version_id) == "queued again"

    async def test_one_that_is_taken_over_stops_its_work(
        self,
        client: httpx.AsyncClient,
        key: NewKey,
        bench: Bench,
        platform: Platform,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        version_id = (await post_upload(client, key, good_adapter(BASE), "a")).json()["id"]
        ended = asyncio.Event()

        async def endless_check(*_: object) -> object:
            try:
                async with platform.db.transaction() as session:
                    run = (await session.scalars(select(ValidationRun))).one()
                    run.owner = "wrk_another"
                await asyncio.sleep(60)
            finally:
                ended.set()
            raise AssertionError("it was not stopped")

        monkeypatch.setattr(validation, "_check", endless_check)
        async with asyncio.timeout(10):
            assert await validate_version(bench.resources, version_id) == "taken over"
        assert ended.is_set()


class TestPoison:
    async def test_a_fault_of_ours_ends_failed_after_three_attempts_and_an_operator_tries_again(
        self,
        client: httpx.AsyncClient,
        key: NewKey,
        bench: Bench,
        clock: FrozenClock,
        operator: dict[str, str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        version_id = (await post_upload(client, key, good_adapter(BASE), "a")).json()["id"]

        async def broken(*_: object) -> object:
            raise KeyError("v_proj")

        monkeypatch.setattr(validation, "_behaviour", broken)
        outcomes = []
        for _ in range(4):
            outcomes += await bench.work()
            clock.advance(seconds=validation.RETRY_AFTER_S + 1)
            await sweep(bench.resources)
        assert outcomes == ["queued again", "queued again", "failed"]
        listed = await client.get(
            "/admin/v1/adapters/validations", params={"state": "failed"}, headers=operator
        )
        (entry,) = listed.json()["data"]
        assert (entry["version_id"], entry["attempts"]) == (version_id, 3)
        assert entry["code"] == "validation_error"
        assert "KeyError" in entry["message"]
        assert listed.json()["counts"] == {
            "queued": 0,
            "running": 0,
            "failed": 1,
            "base_changed": 0,
        }
        monkeypatch.undo()
        again = await client.post(
            f"/admin/v1/adapters/versions/{version_id}/validate", headers=operator
        )
        assert again.status_code == 200
        assert await bench.work() == ["ready"]
        listed = await client.get("/admin/v1/adapters/validations", headers=operator)
        assert [entry["state"] for entry in listed.json()["data"]] == [run_repository.DONE]
        assert listed.json()["counts"]["failed"] == 0

    async def test_a_bad_one_in_front_does_not_hold_up_a_good_one(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bad = (await post_upload(client, key, good_adapter(BASE, seed=1), "a")).json()["id"]
        await post_upload(client, key, good_adapter(BASE, seed=2), "a")
        behaviour = validation._behaviour

        async def sometimes(resources, claim, *rest):  # type: ignore[no-untyped-def]
            if claim.version_id == bad:
                raise KeyError("v_proj")
            return await behaviour(resources, claim, *rest)

        monkeypatch.setattr(validation, "_behaviour", sometimes)
        assert await bench.work() == ["queued again", "ready"]

    async def test_a_store_that_is_away_costs_no_attempt(
        self,
        client: httpx.AsyncClient,
        key: NewKey,
        bench: Bench,
        clock: FrozenClock,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        await post_upload(client, key, good_adapter(BASE), "a")

        def away(_ref: AdapterRef) -> object:
            raise StoreUnavailable("the adapter store does not answer")

        monkeypatch.setattr(bench.resources.store, "open", away)
        for _ in range(4):
            assert await bench.work() == ["queued again"]
            clock.advance(seconds=validation.RETRY_AFTER_S + 1)
            await sweep(bench.resources)
        monkeypatch.undo()
        assert await bench.work() == ["ready"]

    async def test_a_list_of_validations_pages(
        self,
        client: httpx.AsyncClient,
        key: NewKey,
        bench: Bench,
        operator: dict[str, str],
    ) -> None:
        bench.engine.fail_with = EngineUnavailable("away")
        for seed in range(3):
            await post_upload(client, key, good_adapter(BASE, seed=seed), "a")
        seen, after = [], None
        while True:
            params = {"limit": "2"} | ({"after": after} if after else {})
            page = await client.get(
                "/admin/v1/adapters/validations", params=params, headers=operator
            )
            seen += [entry["version"] for entry in page.json()["data"]]
            if not page.json()["has_more"]:
                break
            after = page.json()["last_id"]
        assert seen == [3, 2, 1]
