"""Uploads in parts: in any order, again, over restarts; quotas, expiry, foreign tenants."""

import asyncio
import json
from datetime import timedelta

import httpx
import pytest
from fastapi import FastAPI

from app.adapters import resumable, sweeps, upload_completion
from app.adapters.tasks import clean
from app.clock import FrozenClock
from app.keys.service import NewKey
from app.main import create_app
from app.platform import Platform, open_platform
from app.settings import Settings
from app.tenants import deletion
from app.tenants.service import find_tenant
from engine.adapters.folder_store import FolderStore
from tests.adapter_files import good_adapter, tiny_description
from tests.factories import bearer, make_key, make_tenant, make_user, sign_in
from tests.upload_parts import PartedUpload, content_digest, error_of
from tests.validation_bench import Bench, make_bench, post_upload

BASE = tiny_description()
PART_BYTES = 4096
SIZE = sum(len(data or b"") for data in (good_adapter(BASE).config, good_adapter(BASE).weights))


@pytest.fixture
def database_url(any_database_url: str) -> str:
    return any_database_url


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"upload_part_bytes": PART_BYTES, "max_open_uploads": 3})


@pytest.fixture
async def bench(app: FastAPI) -> Bench:
    return await make_bench(app)


@pytest.fixture
async def key(platform: Platform) -> NewKey:
    return await make_key(platform, await make_tenant(platform))


@pytest.fixture
async def upload(client: httpx.AsyncClient, key: NewKey, bench: Bench) -> PartedUpload:
    """Begun, with no part there yet."""
    begun = PartedUpload(client, key, good_adapter(BASE))
    assert (await begun.begin()).status_code == 201
    assert len(begun.parts) > 3
    return begun


def parts_stored(bench: Bench) -> int:
    store = bench.resources.store
    assert isinstance(store, FolderStore)
    return sum(1 for path in (store.root / ".parts").rglob("*") if path.is_file())


class TestTheWayToAVersion:
    async def test_parts_become_the_version_that_one_body_would_be(
        self, upload: PartedUpload, client: httpx.AsyncClient, bench: Bench
    ) -> None:
        await upload.put_all()
        done = await upload.complete()
        assert done.status_code == 202
        assert done.headers["location"] == "/v1/adapters/a/versions/1"
        assert await bench.work() == ["ready"]
        whole = await post_upload(client, upload.key, upload.files, "a")
        assert (whole.status_code, whole.json()["id"]) == (200, done.json()["id"])

    async def test_the_answer_tells_which_parts_are_there(self, upload: PartedUpload) -> None:
        await upload.put(2)
        seen = (await upload.get()).json()
        assert [part["number"] for part in seen["received"]] == [2]
        assert seen["received"][0]["bytes"] == PART_BYTES
        assert seen["missing"] == [0, 1, *range(3, len(upload.parts))]
        assert seen["parts"] == len(upload.parts) - 1
        assert seen["state"] == "open"

    async def test_parts_may_come_in_any_order_and_at_once(
        self, upload: PartedUpload, bench: Bench, app: FastAPI
    ) -> None:
        numbers = list(reversed(range(len(upload.parts))))
        for some in (numbers[:3], numbers[3:6], numbers[6:]):
            answers = await asyncio.gather(*(upload.put(number) for number in some))
            assert {answer.status_code for answer in answers} <= {200}
        assert (await upload.complete()).status_code == 202
        assert await bench.work() == ["ready"]

    async def test_completing_again_answers_the_same_and_queues_nothing(
        self, upload: PartedUpload, bench: Bench
    ) -> None:
        await upload.put_all()
        first, second = await upload.complete(), await upload.complete()
        assert (first.status_code, second.status_code) == (202, 200)
        assert first.json()["id"] == second.json()["id"]
        assert len(bench.queue.messages) == 1
        assert (await upload.get()).json()["version"] == {
            "id": first.json()["id"],
            "adapter": "a",
            "version": 1,
        }

    async def test_completing_twice_at_once_makes_one_version(
        self, upload: PartedUpload, bench: Bench
    ) -> None:
        await upload.put_all()
        answers = await asyncio.gather(*(upload.complete() for _ in range(3)))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 202]
        assert len({answer.json()["id"] for answer in answers}) == 1

    @pytest.mark.parametrize("rank", [0, -1, 257, 1.5, "8"])
    async def test_a_config_beyond_the_rank_limit_is_refused_as_its_part_comes(
        self, upload: PartedUpload, rank: object
    ) -> None:
        wrong = json.dumps({**json.loads(upload.parts[0]), "r": rank}).encode()
        begun = await upload.begin(config_bytes=len(wrong))
        assert begun.status_code == 201
        refused = await upload.put(0, wrong)
        assert error_of(refused) == (400, "rank_out_of_range", "r")
        assert 0 in (await upload.get()).json()["missing"]

    async def test_nothing_of_the_parts_stays_behind(
        self, upload: PartedUpload, bench: Bench
    ) -> None:
        await upload.put_all()
        assert parts_stored(bench) == len(upload.parts)
        await upload.complete()
        assert parts_stored(bench) == 0
        assert bench.resources.store.list_staging_older_than(0) == []

    async def test_an_idempotency_key_begins_once(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        body = {"name": "a", "config_bytes": 10, "weights_bytes": 10}
        headers = bearer(key) | {"idempotency-key": "begin-1"}
        answers = [await client.post("/v1/uploads", json=body, headers=headers) for _ in "12"]
        assert answers[0].json() == answers[1].json()
        listed = await client.get("/v1/uploads", headers=bearer(key))
        assert len(listed.json()["data"]) == 1


class TestAPartAgain:
    async def test_the_same_bytes_change_nothing(self, upload: PartedUpload, bench: Bench) -> None:
        first, again = await upload.put(1), await upload.put(1)
        assert first.json() == again.json()
        assert parts_stored(bench) == 1

    async def test_other_bytes_take_the_place(self, upload: PartedUpload, bench: Bench) -> None:
        await upload.put_all()
        wrong = bytes(PART_BYTES)
        replaced = await upload.put(2, wrong)
        assert replaced.json()["sha256"] != (await upload.put(2)).json()["sha256"]
        assert parts_stored(bench) == len(upload.parts)
        await upload.complete()
        assert await bench.work() == ["ready"]

    async def test_a_complete_upload_takes_no_more(self, upload: PartedUpload) -> None:
        await upload.put_all()
        await upload.complete()
        assert error_of(await upload.put(1)) == (409, "upload_completed", "id")

    async def test_one_that_comes_while_the_parts_are_put_together_is_not_mixed_in(
        self, upload: PartedUpload, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await upload.put_all()
        assemble = upload_completion._assemble

        async def slowly(*given: object) -> str:
            sha256 = await assemble(*given)  # type: ignore[arg-type]
            await upload.put(1, bytes(PART_BYTES))
            return sha256

        monkeypatch.setattr(upload_completion, "_assemble", slowly)
        assert error_of(await upload.complete()) == (409, "upload_changed", "id")
        assert list(bench.resources.store.refs()) == []
        monkeypatch.undo()
        await upload.put(1)
        assert (await upload.complete()).status_code == 202

    async def test_what_the_store_has_lost_is_asked_for_again(
        self, upload: PartedUpload, bench: Bench
    ) -> None:
        await upload.put_all()
        bench.resources.store.drop_parts(upload.id)
        await upload.put(2, bytes(PART_BYTES))
        assert error_of(await upload.complete()) == (409, "parts_lost", "parts")
        missing = (await upload.get()).json()["missing"]
        assert missing == [n for n in range(len(upload.parts)) if n != 2]
        await upload.put_all()
        assert (await upload.complete()).status_code == 202


class TestWhatIsRefused:
    async def test_a_part_that_was_damaged_on_its_way(
        self, upload: PartedUpload, bench: Bench
    ) -> None:
        good = content_digest(upload.parts[1])
        damaged = b"\xff" + upload.parts[1][1:]
        refused = await upload.put(1, damaged, **{"content-digest": good})
        assert error_of(refused) == (400, "digest_mismatch", "Content-Digest")
        assert parts_stored(bench) == 0
        assert (await upload.put(1, **{"content-digest": good})).status_code == 200

    @pytest.mark.parametrize("header", ["", "md5=:aaaa:", "sha-256=abc", "sha-512=:YQ==:"])
    async def test_a_checksum_of_another_form(self, header: str, upload: PartedUpload) -> None:
        refused = await upload.put(1, **{"content-digest": header})
        assert error_of(refused) == (400, "digest_malformed", "Content-Digest")

    @pytest.mark.parametrize("change", [-1, 1, -PART_BYTES])
    async def test_a_part_of_another_size(
        self, change: int, upload: PartedUpload, bench: Bench
    ) -> None:
        data = (upload.parts[1] + b"x")[: PART_BYTES + change]
        assert error_of(await upload.put(1, data)) == (400, "part_size_mismatch", "number")
        assert parts_stored(bench) == 0

    async def test_a_body_that_hides_its_length_is_stopped_at_the_parts_end(
        self, upload: PartedUpload, client: httpx.AsyncClient, bench: Bench
    ) -> None:
        sent = 0

        async def endless():  # type: ignore[no-untyped-def]
            nonlocal sent
            while sent < 1_000_000:
                sent += 1024
                yield b"x" * 1024

        refused = await client.put(
            f"/v1/uploads/{upload.id}/parts/1", content=endless(), headers=bearer(upload.key)
        )
        assert error_of(refused) == (400, "part_size_mismatch", "number")
        assert sent <= PART_BYTES + 2048
        assert parts_stored(bench) == 0

    async def test_a_part_beyond_the_last(self, upload: PartedUpload) -> None:
        refused = await upload.put(len(upload.parts), b"x")
        assert error_of(refused) == (400, "part_out_of_range", "number")

    @pytest.mark.parametrize("number", ["-1", "x", "1.5", "99999999999999999999"])
    async def test_a_part_number_that_is_none(
        self, number: str, upload: PartedUpload, client: httpx.AsyncClient
    ) -> None:
        response = await client.put(
            f"/v1/uploads/{upload.id}/parts/{number}", content=b"", headers=bearer(upload.key)
        )
        assert 400 <= response.status_code < 500

    async def test_completing_with_parts_missing_names_them(self, upload: PartedUpload) -> None:
        await upload.put(0)
        refused = await upload.complete()
        assert error_of(refused) == (409, "parts_missing", "parts")
        assert "parts 1, 2, 3" in refused.json()["error"]["message"]

    async def test_weights_that_are_not_those_announced(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        upload = PartedUpload(client, key, good_adapter(BASE))
        await upload.begin(weights_sha256="0" * 64)
        await upload.put_all()
        assert error_of(await upload.complete()) == (400, "digest_mismatch", "weights_sha256")
        assert list(bench.resources.store.refs()) == []

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"name": "../a"}, (400, "invalid_adapter_name", "name")),
            ({"name": BASE.name}, (409, "name_of_base_model", "name")),
            ({"config_bytes": 300_000}, (413, "config_too_large", "config_bytes")),
            ({"weights_bytes": 2**40}, (413, "adapter_too_large", "weights_bytes")),
        ],
    )
    async def test_an_announcement_that_would_be_refused_in_the_end(
        self,
        changes: dict[str, object],
        expected: tuple[int, str, str],
        client: httpx.AsyncClient,
        key: NewKey,
        bench: Bench,
    ) -> None:
        upload = PartedUpload(client, key, good_adapter(BASE))
        assert error_of(await upload.begin(**changes)) == expected

    @pytest.mark.parametrize(
        "changes",
        [
            {"weights_bytes": 0},
            {"config_bytes": -1},
            {"weights_bytes": "12"},
            {"weights_bytes": 1.5},
            {"weights_bytes": 10**30},
            {"weights_sha256": "abc"},
            {"path": "/etc/passwd"},
            {"name": None},
        ],
    )
    async def test_an_announcement_that_makes_no_sense_names_its_field(
        self, changes: dict[str, object], client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        upload = PartedUpload(client, key, good_adapter(BASE))
        response = await upload.begin(**changes)
        assert response.status_code in (400, 422)
        assert response.json()["error"]["param"] == next(iter(changes))

    async def test_a_body_as_large_as_an_adapter_where_json_is_expected(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench, settings: Settings
    ) -> None:
        response = await client.post(
            "/v1/uploads", content=b" " * (settings.max_body_bytes + 1), headers=bearer(key)
        )
        assert error_of(response)[:2] == (413, "body_too_large")


class TestRestarts:
    async def test_another_api_process_takes_over(
        self,
        upload: PartedUpload,
        settings: Settings,
        clock: FrozenClock,
        platform: Platform,
        app: FastAPI,
    ) -> None:
        """Another app on the same database and store, as after a restart or behind a balancer."""
        for number in (3, 0):
            await upload.put(number)
        other = open_platform(settings, clock=clock, passwords=platform.passwords)
        second = create_app(platform=other)
        bench = await make_bench(second)
        transport = httpx.ASGITransport(second, client=("127.0.0.1", 50001))
        async with (
            second.router.lifespan_context(second),
            httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client,
        ):
            taken_over = PartedUpload(
                client, upload.key, upload.files, id=upload.id, part_bytes=upload.part_bytes
            )
            for number in (await taken_over.get()).json()["missing"]:
                assert (await taken_over.put(number)).status_code == 200
            assert (await taken_over.complete()).status_code == 202
            assert await bench.work() == ["ready"]

    async def test_a_client_that_lost_the_id_finds_the_upload(
        self, upload: PartedUpload, client: httpx.AsyncClient
    ) -> None:
        await upload.put(1)
        listed = (await client.get("/v1/uploads", headers=bearer(upload.key))).json()["data"]
        assert [entry["id"] for entry in listed] == [upload.id]
        assert listed[0] == (await upload.get()).json()


class TestQuotas:
    @pytest.fixture
    async def key(self, platform: Platform) -> NewKey:
        """Room for two adapters and a half."""
        tenant = await make_tenant(platform, max_stored_bytes=2 * SIZE + SIZE // 2)
        return await make_key(platform, tenant)

    def upload_of(self, client: httpx.AsyncClient, key: NewKey, seed: int) -> PartedUpload:
        return PartedUpload(client, key, good_adapter(BASE, seed=seed), name=f"a{seed}")

    async def test_bytes_are_reserved_up_front_and_given_back(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        uploads = [self.upload_of(client, key, seed) for seed in range(3)]
        assert (await uploads[0].begin()).status_code == 201
        assert (await uploads[1].begin()).status_code == 201
        refused = await uploads[2].begin()
        assert error_of(refused)[:2] == (403, "stored_bytes_exceeded")
        assert "reserved" in refused.json()["error"]["message"]
        whole = await post_upload(client, key, uploads[2].files, "whole")
        assert error_of(whole)[:2] == (403, "stored_bytes_exceeded")
        assert (await uploads[1].delete()).status_code == 200
        assert (await uploads[2].begin()).status_code == 201

    async def test_a_complete_upload_counts_once(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        first, second = self.upload_of(client, key, 0), self.upload_of(client, key, 1)
        await first.begin()
        await second.begin()
        for upload in (first, second):
            await upload.put_all()
            assert (await upload.complete()).status_code == 202
        assert error_of(await self.upload_of(client, key, 2).begin())[0] == 403

    async def test_the_same_content_takes_no_further_room(
        self, client: httpx.AsyncClient, key: NewKey, bench: Bench, platform: Platform
    ) -> None:
        for name in ("x", "y", "z"):
            upload = PartedUpload(client, key, good_adapter(BASE), name=name)
            assert (await upload.begin()).status_code == 201
            await upload.put_all()
            assert (await upload.complete()).status_code == 202
        assert len(list(bench.resources.store.refs())) == 1
        for name, disk in (("x", "kept"), ("y", "kept"), ("z", "erased")):
            receipt = await client.delete(f"/v1/adapters/{name}", headers=bearer(key))
            assert [item["disk"] for item in receipt.json()["items"]] == [disk]
        assert list(bench.resources.store.refs()) == []

    async def test_a_tenant_has_few_uploads_under_way(
        self, client: httpx.AsyncClient, bench: Bench, platform: Platform
    ) -> None:
        key = await make_key(platform, await make_tenant(platform))
        for seed in range(3):
            assert (await self.upload_of(client, key, seed).begin()).status_code == 201
        refused = await self.upload_of(client, key, 4).begin()
        assert error_of(refused)[:2] == (403, "too_many_open_uploads")

    async def test_the_number_of_adapters_is_looked_at_first(
        self, client: httpx.AsyncClient, bench: Bench, platform: Platform
    ) -> None:
        key = await make_key(platform, await make_tenant(platform, max_adapters=0))
        refused = await self.upload_of(client, key, 0).begin()
        assert error_of(refused) == (403, "adapters_exceeded", "name")


class TestExpiry:
    async def test_after_a_day_it_is_gone_and_its_bytes_are_free(
        self, upload: PartedUpload, bench: Bench, clock: FrozenClock
    ) -> None:
        await upload.put(1)
        clock.advance(seconds=timedelta(days=1).total_seconds() - 1)
        assert (await upload.get()).status_code == 200
        clock.advance(seconds=2)
        assert error_of(await upload.get()) == (404, "upload_not_found", "id")
        assert error_of(await upload.put(2))[0] == 404
        assert parts_stored(bench) == 1
        await clean(bench.resources)
        assert parts_stored(bench) == 0

    async def test_the_sweep_leaves_open_uploads_alone_and_takes_what_nobody_has(
        self, upload: PartedUpload, bench: Bench
    ) -> None:
        await upload.put(1)
        orphan = bench.resources.store.new_part("upl_nobody")
        orphan.write(b"left behind")
        orphan.finish()
        assert await sweeps.sweep_uploads(bench.resources) == 0
        assert bench.resources.store.uploads_with_parts() == [upload.id]

    async def test_giving_up_removes_the_parts_at_once(
        self, upload: PartedUpload, bench: Bench
    ) -> None:
        await upload.put_all()
        assert (await upload.delete()).json() == {
            "object": "upload.deleted",
            "id": upload.id,
            "deleted": True,
        }
        assert parts_stored(bench) == 0
        assert (await upload.get()).status_code == 404

    async def test_a_deleted_tenant_leaves_none(
        self, upload: PartedUpload, bench: Bench, platform: Platform
    ) -> None:
        await upload.put(1)
        tenant_id = upload.key.row.tenant_id or ""
        async with platform.db.transaction() as session:
            tenant = await find_tenant(session, tenant_id)
            await deletion.begin(
                session,
                tenant_id,
                confirm=tenant.name,
                now=platform.clock.now(),
                actor="tests",
            )
        assert parts_stored(bench) == 1
        await deletion.carry_on(bench.resources, tenant_id)
        assert parts_stored(bench) == 0
        assert await sweeps.sweep_uploads(bench.resources) == 0


class TestForeigners:
    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("GET", ""),
            ("PUT", "/parts/0"),
            ("POST", "/complete"),
            ("DELETE", ""),
        ],
    )
    async def test_another_tenants_upload_cannot_be_told_from_none(
        self,
        method: str,
        path: str,
        upload: PartedUpload,
        client: httpx.AsyncClient,
        platform: Platform,
    ) -> None:
        stranger = await make_key(platform, await make_tenant(platform))

        async def ask(upload_id: str) -> tuple[int, str]:
            response = await client.request(
                method, f"/v1/uploads/{upload_id}{path}", headers=bearer(stranger)
            )
            return response.status_code, response.text.replace(upload_id, "ID")

        unknown = "upl_" + "0" * 26
        assert await ask(upload.id) == await ask(unknown)
        assert (await ask(upload.id))[0] == 404
        assert (await upload.get()).status_code == 200

    async def test_a_key_beyond_its_scope_sees_none_either(
        self, upload: PartedUpload, client: httpx.AsyncClient, platform: Platform
    ) -> None:
        async with platform.db.reading() as session:
            tenant = await find_tenant(session, upload.key.row.tenant_id or "")
        scoped = await make_key(platform, tenant, adapters=["another"])
        answer = await client.get(f"/v1/uploads/{upload.id}", headers=bearer(scoped))
        assert error_of(answer) == (404, "upload_not_found", "id")
        listed = await client.get("/v1/uploads", headers=bearer(scoped))
        assert listed.json()["data"] == []

    @pytest.mark.parametrize("upload_id", ["..", "%2e%2e", "upl_", "upl_" + "A" * 26, "x" * 300])
    async def test_names_that_are_no_uploads_reach_no_disk(
        self, upload_id: str, client: httpx.AsyncClient, key: NewKey, bench: Bench
    ) -> None:
        response = await client.get(f"/v1/uploads/{upload_id}", headers=bearer(key))
        assert 400 <= response.status_code < 500


async def test_a_store_that_is_full_is_a_503_and_leaves_nothing(
    upload: PartedUpload, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.adapters import folder_store as module

    def full(self: object, chunk: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.FolderPart, "write", full)
    refused = await upload.put(1)
    assert error_of(refused)[:2] == (503, "store_unavailable")
    assert int(refused.headers["retry-after"]) >= 1
    assert parts_stored(bench) == 0


def test_files_of_every_size_are_cut_into_parts_that_add_up() -> None:
    from app.adapters.models import Upload

    for weights in (1, 9, 10, 11, 20, 21, 1000):
        upload = Upload(config_bytes=7, weights_bytes=weights, part_bytes=10)
        sizes = [resumable.part_size(upload, n) for n in range(resumable.part_count(upload) + 1)]
        assert sizes[0] == 7
        assert sum(sizes[1:]) == weights
        assert all(0 < size <= 10 for size in sizes[1:])


class TestTheConsolesOpenings:
    async def test_a_page_sends_parts_under_its_session(
        self, client: httpx.AsyncClient, bench: Bench, platform: Platform
    ) -> None:
        tenant = await make_tenant(platform)
        client.cookies.update(await sign_in(platform, await make_user(platform, tenant)))
        files = good_adapter(BASE)
        weights = files.weights or b""
        begun = await client.post(
            "/console/uploads",
            json={
                "name": "a",
                "config_bytes": len(files.config or b""),
                "weights_bytes": len(weights),
            },
        )
        assert begun.status_code == 201, begun.text
        where, size = f"/console/uploads/{begun.json()['id']}", begun.json()["part_bytes"]
        await client.put(f"{where}/parts/0", content=files.config)
        early = await client.post(f"{where}/complete")
        assert error_of(early)[:2] == (409, "parts_missing")
        for number in (await client.get(where)).json()["missing"]:
            part = weights[(number - 1) * size : number * size]
            assert (await client.put(f"{where}/parts/{number}", content=part)).status_code == 200
        done = await client.post(f"{where}/complete")
        assert done.json() == {"location": "/console/adapters/a/versions/1"}
        assert (await client.get("/console/uploads")).json()["data"] == []
        assert (await client.delete(where)).json()["deleted"] is True
        assert await bench.work() == ["ready"]

    async def test_a_viewer_and_an_operator_may_not(
        self, client: httpx.AsyncClient, bench: Bench, platform: Platform
    ) -> None:
        tenant = await make_tenant(platform)
        viewer = await make_user(platform, tenant, role="tenant_viewer")
        for user in (viewer, await make_user(platform)):
            client.cookies.clear()
            client.cookies.update(await sign_in(platform, user))
            answer = await client.get("/console/uploads")
            assert answer.status_code == 403
