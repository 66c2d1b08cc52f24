"""From POST /v1/adapters to a verdict: the API, the queue's rows and the task's own body."""

import asyncio
from datetime import timedelta

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import func, select

from app.adapters import sweeps, validation
from app.adapters.models import Adapter, AdapterVersion, Check, ValidationRun
from app.adapters.tasks import sweep, validate_version
from app.adapters.uploads import UploadGate
from app.audit.models import AuditEvent
from app.clock import FrozenClock
from app.keys.service import NewKey
from app.platform import Platform
from app.tenants.service import update_tenant
from engine.errors import AdapterRefused, EngineUnavailable
from tests.adapter_files import AdapterFiles, good_adapter, tiny_description
from tests.factories import bearer, make_key, make_tenant
from tests.validation_bench import Bench, make_bench, post_upload

BASE = tiny_description()


@pytest.fixture
def database_url(any_database_url: str) -> str:
    return any_database_url


@pytest.fixture
async def bench(app: FastAPI) -> Bench:
    return await make_bench(app)


@pytest.fixture
async def key(platform: Platform) -> NewKey:
    return await make_key(platform, await make_tenant(platform))


def files(seed: int = 0) -> AdapterFiles:
    return good_adapter(BASE, seed=seed)


async def upload(client: httpx.AsyncClient, key: NewKey, seed: int = 0, name: str = "a") -> str:
    """Uploads a good adapter; its version's id."""
    response = await post_upload(client, key, files(seed), name)
    assert response.status_code == 202, response.text
    return str(response.json()["id"])


async def version(client: httpx.AsyncClient, key: NewKey, number: int = 1) -> dict[str, object]:
    response = await client.get(f"/v1/adapters/a/versions/{number}", headers=bearer(key))
    assert response.status_code == 200, response.text
    return dict(response.json())


async def count(platform: Platform, model: type) -> int:
    async with platform.db.reading() as session:
        return await session.scalar(select(func.count()).select_from(model)) or 0


class TestTheWayToReady:
    async def test_an_upload_is_accepted_validated_and_callable(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        response = await post_upload(client, key, files(), "a")
        assert response.status_code == 202
        assert response.headers["location"] == "/v1/adapters/a/versions/1"
        assert response.json()["state"] == "uploaded"
        assert await bench.work() == ["ready"]
        ready = await version(client, key)
        assert (ready["state"], ready["rank"], ready["code"]) == ("ready", 4, None)
        assert ready["base_digest"] == BASE.base_digest
        report = ready["report"]
        assert isinstance(report, dict)
        assert [(c["group"], c["status"]) for c in report["checks"]] == [
            ("container", "pass"),
            ("config", "pass"),
            ("coverage", "pass"),
            ("numbers", "pass"),
            ("behaviour", "pass"),
        ]
        figures = report["checks"][4]["figures"]
        assert figures["divergence_nats"] > 0
        assert figures["adapter_token_ms"] > figures["base_token_ms"]

    async def test_probes_run_as_the_systems_requests_with_the_tenants_adapter(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        await upload(client, key)
        await bench.work()
        assert {request.system for request in bench.engine.requests} == {True}
        assert {request.tenant for request in bench.engine.requests} == {"system"}
        digests = {r.adapter.digest for r in bench.engine.requests if r.adapter is not None}
        assert digests == {(await version(client, key))["digest"]}
        salts = [request.cache_salt for request in bench.engine.requests]
        assert len(set(salts)) == len(salts)

    async def test_the_live_alias_follows_new_versions_until_it_is_set_by_hand(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        async def live() -> list[dict[str, int]]:
            response = await client.get("/v1/adapters/a", headers=bearer(key))
            aliases = {alias["alias"]: alias for alias in response.json()["aliases"]}
            return list(aliases["live"]["targets"])

        for seed in (1, 2):
            await upload(client, key, seed)
            await bench.work()
            assert await live() == [{"version": seed, "weight": 100}]
        await client.put(
            "/v1/adapters/a/aliases/live",
            json={"targets": [{"version": 1, "weight": 100}]},
            headers=bearer(key),
        )
        await upload(client, key, 3)
        await bench.work()
        assert await live() == [{"version": 1, "weight": 100}]

    async def test_an_older_version_that_is_ready_late_does_not_take_live_back(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        first, second = await upload(client, key, 1), await upload(client, key, 2)
        assert await validate_version(bench.resources, second) == "ready"
        assert await validate_version(bench.resources, first) == "ready"
        response = await client.get("/v1/adapters/a", headers=bearer(key))
        assert response.json()["aliases"][0]["targets"] == [{"version": 2, "weight": 100}]

    async def test_every_step_leaves_an_audit_event(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench, platform: Platform
    ) -> None:
        await upload(client, key)
        await bench.work()
        async with platform.db.reading() as session:
            actions = set(await session.scalars(select(AuditEvent.action)))
        assert {"adapter.upload", "adapter.ready"} <= actions


class TestTheSameContentAgain:
    async def test_it_answers_with_the_version_that_is_there(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench, platform: Platform
    ) -> None:
        first = await upload(client, key)
        again = await post_upload(client, key, files(), "a")
        assert (again.status_code, again.json()["id"]) == (200, first)
        assert await count(platform, AdapterVersion) == 1
        assert len(bench.queue.messages) == 1

    async def test_under_another_name_it_is_another_adapter(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        await upload(client, key)
        other = await post_upload(client, key, files(), "b")
        assert (other.status_code, other.json()["version"]) == (202, 1)

    async def test_a_version_that_failed_is_queued_again(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench, platform: Platform
    ) -> None:
        first = await upload(client, key)
        async with platform.db.transaction() as session:
            row = await session.get_one(AdapterVersion, first)
            row.state = "failed"
            run = (await session.scalars(select(ValidationRun))).one()
            run.state = "failed"
        again = await post_upload(client, key, files(), "a")
        assert (again.status_code, again.json()["id"]) == (202, first)
        assert await bench.work() == ["ready", "nothing to do"]

    async def test_an_idempotency_key_brings_the_same_version_and_no_other(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        header = {"idempotency-key": "push-1"}
        first = await post_upload(client, key, files(), "a", **header)
        second = await post_upload(client, key, files(), "a", **header)
        assert (first.status_code, second.status_code) == (202, 200)
        assert first.json()["id"] == second.json()["id"]
        other = await post_upload(client, key, files(1), "a", **header)
        assert other.status_code == 409
        assert other.json()["error"]["code"] == "idempotency_key_reused"


class TestUploadsAtTheSameTime:
    async def test_the_same_content_makes_one_version(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench, platform: Platform
    ) -> None:
        answers = await asyncio.gather(*(post_upload(client, key, files(), "a") for _ in range(4)))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 202]
        assert await count(platform, AdapterVersion) == 1
        assert await bench.work() == ["ready"]

    async def test_a_quota_is_not_overrun(
        self, client: httpx.AsyncClient, bench: Bench, platform: Platform
    ) -> None:
        key = await make_key(platform, await make_tenant(platform, max_adapters=1))
        answers = await asyncio.gather(
            *(post_upload(client, key, files(), name) for name in ("a", "b", "c"))
        )
        assert sorted(answer.status_code for answer in answers) == [202, 403, 403]

    async def test_one_tenant_may_not_hold_all_places(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench, app: FastAPI
    ) -> None:
        app.state.upload_gate = UploadGate(limit=1)
        with app.state.upload_gate.enter(key.row.tenant_id or ""):
            refused = await post_upload(client, key, files(), "a")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_uploads")
        assert int(refused.headers["retry-after"]) >= 1
        await upload(client, key)


class TestTwoDeliveries:
    async def test_the_second_finds_nothing_to_do(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench, platform: Platform
    ) -> None:
        version_id = await upload(client, key)
        assert await validate_version(bench.resources, version_id) == "ready"
        assert await validate_version(bench.resources, version_id) == "nothing to do"
        assert await count(platform, Check) == 5

    async def test_one_that_comes_while_the_first_works_leaves_it_alone(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench, platform: Platform
    ) -> None:
        version_id = await upload(client, key)
        claim = await validation._claim(bench.resources, version_id)
        assert claim is not None
        assert await validate_version(bench.resources, version_id) == "nothing to do"
        assert (await version(client, key))["state"] == "validating"

    async def test_a_worker_whose_lease_went_to_another_writes_nothing_more(
        self,
        client: httpx.AsyncClient,
        key: NewKey,
        bench: Bench,
        clock: FrozenClock,
        platform: Platform,
    ) -> None:
        version_id = await upload(client, key)
        slow = await validation._claim(bench.resources, version_id)
        assert slow is not None
        clock.advance(seconds=platform.settings.validation_lease_s + 1)
        other = await validation._claim(bench.resources, version_id)
        assert other is not None
        with pytest.raises(validation.LeaseLost):
            await validation._renew(bench.resources, slow)
        with pytest.raises(validation.LeaseLost):
            await validation._check(bench.resources, slow)
        assert await count(platform, Check) == 0
        outcomes, description = await validation._check(bench.resources, other)
        assert await validation._conclude(bench.resources, other, outcomes, description) == "ready"


class TestNoVerdict:
    async def test_without_an_engine_a_run_waits_and_loses_no_attempt(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench, clock: FrozenClock
    ) -> None:
        bench.engine.away = True
        await upload(client, key)
        for _ in range(5):
            assert await bench.work() == ["queued again"]
            report = (await version(client, key))["report"]
            assert isinstance(report, dict)
            assert report["attempts"] == 0
            assert "engine" in report["message"]
            clock.advance(seconds=validation.RETRY_AFTER_S + 1)
            await sweep(bench.resources)
        bench.engine.away = False
        assert await bench.work() == ["ready"]

    async def test_a_bad_file_is_rejected_even_while_no_engine_runs(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        bench.engine.away = True
        good = files()
        assert good.weights is not None
        await post_upload(client, key, AdapterFiles(good.config, good.weights[:-1]), "a")
        assert await bench.work() == ["rejected"]
        rejected = await version(client, key)
        assert (rejected["state"], rejected["code"]) == ("rejected", "truncated_file")

    async def test_an_adapter_that_takes_the_engine_down_is_given_up(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench, clock: FrozenClock
    ) -> None:
        bench.engine.fail_with = EngineUnavailable("the engine's process has ended")
        await upload(client, key)
        outcomes = []
        for _ in range(4):
            outcomes += await bench.work()
            clock.advance(seconds=validation.RETRY_AFTER_S + 1)
            await sweep(bench.resources)
        assert outcomes == ["queued again", "queued again", "failed"]
        failed = await version(client, key)
        assert (failed["state"], failed["code"]) == ("failed", "engine_unavailable")
        assert bench.queue.messages == []

    async def test_what_the_engine_cannot_place_is_rejected_with_its_code(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        bench.engine.fail_with = AdapterRefused("rank 4 is too much", code="rank_above_limit")
        await upload(client, key)
        assert await bench.work() == ["rejected"]
        assert (await version(client, key))["code"] == "rank_above_limit"

    async def test_numbers_that_are_not_finite_are_the_adapters_fault(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        bench.engine.poison = True
        await upload(client, key)
        assert await bench.work() == ["rejected"]
        assert (await version(client, key))["code"] == "non_finite_logits"

    async def test_loops_and_distance_warn_and_never_refuse(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        bench.engine.repeats = True
        await upload(client, key)
        assert await bench.work() == ["ready"]
        report = (await version(client, key))["report"]
        assert isinstance(report, dict)
        behaviour = report["checks"][4]
        assert behaviour["status"] == "warn"
        assert [f["code"] for f in behaviour["findings"]] == ["behaviour_loops"]


class TestTheSweep:
    async def test_it_sends_what_the_broker_never_got(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        bench.queue.away = True
        await upload(client, key)
        assert bench.queue.messages == []
        bench.queue.away = False
        await sweep(bench.resources)
        assert await bench.work() == ["ready"]

    async def test_it_sends_a_lost_message_again_but_not_a_fresh_one(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench, clock: FrozenClock
    ) -> None:
        await upload(client, key)
        bench.queue.messages.clear()
        await sweep(bench.resources)
        assert bench.queue.messages == []
        clock.advance(seconds=sweeps.RESEND_AFTER.total_seconds() + 1)
        await sweep(bench.resources)
        assert await bench.work() == ["ready"]

    async def test_a_worker_that_dies_every_time_ends_in_failed_and_never_loops(
        self,
        client: httpx.AsyncClient,
        key: NewKey,
        bench: Bench,
        clock: FrozenClock,
        platform: Platform,
    ) -> None:
        version_id = await upload(client, key)
        bench.queue.messages.clear()
        for _ in range(platform.settings.validation_attempts):
            assert await validation._claim(bench.resources, version_id) is not None  # then dies
            clock.advance(seconds=platform.settings.validation_lease_s + 1)
            await sweep(bench.resources)
        failed = await version(client, key)
        assert (failed["state"], failed["code"]) == ("failed", "worker_lost")
        bench.queue.messages.clear()
        clock.advance(seconds=timedelta(days=1).total_seconds())
        await sweep(bench.resources)
        assert bench.queue.messages == []

    async def test_stored_files_without_a_version_are_removed_and_others_kept(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench, platform: Platform
    ) -> None:
        tenant_id = (await upload(client, key), await self._tenant(platform))[1]
        staging = bench.resources.store.stage()
        staging.write_config(b"{}")
        staging.write_weights(b"nobody's")
        orphan = staging.commit(tenant_id).ref
        assert await sweeps.sweep_orphans(bench.resources) == 1
        refs = list(bench.resources.store.refs())
        assert orphan not in refs
        assert len(refs) == 1

    async def _tenant(self, platform: Platform) -> str:
        """The one tenant's salt."""
        from app.tenants.models import Tenant

        async with platform.db.reading() as session:
            return str((await session.scalars(select(Tenant.salt))).one())


class TestLimits:
    async def test_adapters_and_bytes_have_quotas(
        self, client: httpx.AsyncClient, bench: Bench, platform: Platform
    ) -> None:
        size = len(files().config or b"") + len(files().weights or b"")
        tenant = await make_tenant(platform, max_adapters=2, max_stored_bytes=3 * size + 100)
        key = await make_key(platform, tenant)
        await upload(client, key, 0, "a")
        await upload(client, key, 1, "b")
        refused = await post_upload(client, key, files(2), "c")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "adapters_exceeded")
        await upload(client, key, 3, "a")
        refused = await post_upload(client, key, files(4), "a")
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (403, "stored_bytes_exceeded")
        assert len(list(bench.resources.store.refs())) == 3
        assert await count(platform, Adapter) == 2

    async def test_deleting_makes_room(
        self, client: httpx.AsyncClient, bench: Bench, platform: Platform
    ) -> None:
        key = await make_key(platform, await make_tenant(platform, max_adapters=1))
        await upload(client, key, 0, "a")
        await client.delete("/v1/adapters/a", headers=bearer(key))
        await upload(client, key, 0, "a")

    async def test_the_tenants_rank_bounds_the_config(
        self, client: httpx.AsyncClient, bench: Bench, platform: Platform
    ) -> None:
        """Refused as it comes; a limit that was lowered since is told by the verdict."""
        tenant = await make_tenant(platform, max_rank=2)
        key = await make_key(platform, tenant)
        refused = await post_upload(client, key, files(0), "a")
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (
            400,
            "rank_out_of_range",
            "r",
        )
        assert await count(platform, AdapterVersion) == 0
        await _set_rank(platform, tenant.id, 256)
        await upload(client, key)
        await _set_rank(platform, tenant.id, 2)
        assert await bench.work() == ["rejected"]
        assert (await version(client, key))["code"] == "rank_out_of_range"


async def _set_rank(platform: Platform, tenant_id: str, max_rank: int) -> None:
    async with platform.db.transaction() as session:
        await update_tenant(
            session,
            tenant_id,
            changes={"max_rank": max_rank},
            now=platform.clock.now(),
            actor="tests",
        )
    platform.forget_keys()
