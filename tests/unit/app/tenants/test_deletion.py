"""Deleting a tenant: refused at once, erased through any crash, and what the receipt says."""

from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI

from app.adapters import erasure, uploads
from app.adapters.tasks import sweep as sweep_adapters
from app.clock import FrozenClock
from app.errors import Forbidden
from app.platform import Platform
from app.tenants import deletion
from app.tenants.models import Tenant
from tests.adapter_files import good_adapter, tiny_description
from tests.factories import bearer, make_caller, make_key, make_tenant, make_user, sign_in
from tests.validation_bench import (
    CONTENT_TYPE,
    Bench,
    make_bench,
    post_upload,
    upload_body,
)

BASE = tiny_description()


@pytest.fixture
def database_url(any_database_url: str) -> str:
    return any_database_url


@pytest.fixture
async def bench(app: FastAPI) -> Bench:
    return await make_bench(app)


@pytest.fixture
async def acme(platform: Platform) -> Tenant:
    return await make_tenant(platform, "acme")


@pytest.fixture
async def operator(client: httpx.AsyncClient, platform: Platform, bench: Bench) -> dict[str, str]:
    return bearer(await make_key(platform, None))


async def upload(
    client: httpx.AsyncClient, platform: Platform, tenant: Tenant, *names: str
) -> None:
    key = await make_key(platform, tenant)
    for seed, name in enumerate(names):
        answer = await post_upload(client, key, good_adapter(BASE, seed=seed), name)
        assert answer.status_code == 202, answer.text


async def delete(
    client: httpx.AsyncClient, operator: dict[str, str], tenant: Tenant, confirm: str = "acme"
) -> httpx.Response:
    return await client.delete(
        f"/admin/v1/tenants/{tenant.id}", params={"confirm": confirm}, headers=operator
    )


def stored(bench: Bench, tenant: Tenant) -> int:
    return sum(ref.salt == tenant.salt for ref in bench.resources.store.refs())


class TestFromTheFirstMoment:
    async def test_neither_its_keys_nor_its_people_get_in(
        self,
        client: httpx.AsyncClient,
        platform: Platform,
        operator: dict[str, str],
        acme: Tenant,
    ) -> None:
        key = await make_key(platform, acme)
        user = await make_user(platform, acme)
        cookies = await sign_in(platform, user)
        assert (await client.get("/v1/models", headers=bearer(key))).status_code == 200
        answer = await delete(client, operator, acme)
        assert answer.status_code == 202
        body = answer.json()
        assert (body["keys_revoked"], body["users_removed"], body["sessions_ended"]) == (1, 1, 1)
        refused = await client.get("/v1/models", headers=bearer(key))
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "revoked_api_key")
        client.cookies.update(cookies)
        page = await client.get("/console/adapters")
        assert page.headers["location"].startswith("/console/sign-in")

    async def test_an_upload_that_was_let_in_before_leaves_nothing_behind(
        self,
        client: httpx.AsyncClient,
        platform: Platform,
        operator: dict[str, str],
        acme: Tenant,
        bench: Bench,
    ) -> None:
        caller = make_caller(platform, acme)
        await delete(client, operator, acme)

        async def stream() -> AsyncIterator[bytes]:
            yield upload_body(good_adapter(BASE), "late")

        with pytest.raises(Forbidden) as caught:
            await uploads.receive(
                bench.resources,
                uploads.UploadGate(),
                caller,
                stream(),
                content_type=CONTENT_TYPE,
            )
        assert caught.value.code == "tenant_deleted"
        assert stored(bench, acme) == 0

    @pytest.mark.parametrize(
        ("method", "path", "body"),
        [
            ("POST", "/admin/v1/tenants/{id}/resume", None),
            ("POST", "/admin/v1/tenants/{id}/suspend", None),
            ("PATCH", "/admin/v1/tenants/{id}", {"max_rank": 8}),
            ("POST", "/admin/v1/keys", {"tenant_id": "{id}"}),
            (
                "POST",
                "/admin/v1/users",
                {"tenant_id": "{id}", "email": "a@example.com", "role": "tenant_admin"},
            ),
        ],
    )
    async def test_nothing_brings_it_back(
        self,
        client: httpx.AsyncClient,
        operator: dict[str, str],
        acme: Tenant,
        method: str,
        path: str,
        body: dict[str, str] | None,
    ) -> None:
        await delete(client, operator, acme)
        filled = {
            k: v.replace("{id}", acme.id) if isinstance(v, str) else v
            for k, v in (body or {}).items()
        }
        answer = await client.request(
            method, path.replace("{id}", acme.id), headers=operator, json=filled or None
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "tenant_deleted")


class TestByAccident:
    @pytest.mark.parametrize("confirm", ["", "ACME", "acm"])
    async def test_nobody_deletes_a_tenant_without_its_name(
        self, client: httpx.AsyncClient, operator: dict[str, str], acme: Tenant, confirm: str
    ) -> None:
        answer = await delete(client, operator, acme, confirm)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "confirm")
        shown = await client.get(f"/admin/v1/tenants/{acme.id}", headers=operator)
        assert shown.json()["status"] == "active"

    async def test_an_unknown_tenant_and_one_that_stays_have_no_receipt(
        self, client: httpx.AsyncClient, operator: dict[str, str], acme: Tenant
    ) -> None:
        for tenant_id in ("ten_none", acme.id):
            path = f"/admin/v1/tenants/{tenant_id}/deletion"
            assert (await client.get(path, headers=operator)).status_code == 404
            assert (await client.get(f"{path}/erasures", headers=operator)).status_code == 404
        gone = await client.delete("/admin/v1/tenants/ten_none", headers=operator)
        assert gone.status_code == 404


class TestErasing:
    async def test_takes_every_adapter_of_the_tenant_and_none_of_another(
        self,
        client: httpx.AsyncClient,
        platform: Platform,
        operator: dict[str, str],
        acme: Tenant,
        bench: Bench,
        clock: FrozenClock,
    ) -> None:
        other = await make_tenant(platform)
        await upload(client, platform, acme, "a", "b", "c")
        await upload(client, platform, other, "a")
        receipt = (await delete(client, operator, acme)).json()
        assert receipt["adapters"] == {"left": 0, "erased": 3, "pending": 0}
        assert (stored(bench, acme), stored(bench, other)) == (0, 1)
        assert {ref.salt for ref in bench.engine.forgotten} == {acme.salt}
        path = f"/admin/v1/tenants/{acme.id}/deletion/erasures"
        erasures = (await client.get(path, headers=operator)).json()["data"]
        assert [entry["items"][0]["disk"] for entry in erasures] == ["erased"] * 3
        assert all(entry["complete"] for entry in erasures)

    async def test_is_complete_when_every_process_must_have_heard_of_it(
        self,
        client: httpx.AsyncClient,
        platform: Platform,
        operator: dict[str, str],
        acme: Tenant,
        bench: Bench,
        clock: FrozenClock,
    ) -> None:
        await upload(client, platform, acme, "a")
        assert (await delete(client, operator, acme)).json()["complete"] is False
        assert await deletion.sweep(bench.resources) == 1
        clock.advance(seconds=10)
        assert await deletion.sweep(bench.resources) == 0
        again = await delete(client, operator, acme)
        assert (again.status_code, again.json()["complete"]) == (200, True)
        shown = await client.get(f"/admin/v1/tenants/{acme.id}", headers=operator)
        assert shown.json()["status"] == "deleted"

    async def test_frees_the_name_and_leaves_the_lists(
        self,
        client: httpx.AsyncClient,
        operator: dict[str, str],
        acme: Tenant,
        bench: Bench,
        clock: FrozenClock,
    ) -> None:
        await delete(client, operator, acme)
        clock.advance(seconds=10)
        await deletion.sweep(bench.resources)
        listed = await client.get("/admin/v1/tenants", headers=operator)
        assert acme.id not in listed.text
        every = await client.get("/admin/v1/tenants?deleted=true", headers=operator)
        assert acme.id in every.text
        made = await client.post("/admin/v1/tenants", headers=operator, json={"name": "acme"})
        assert made.status_code == 201
        receipt = await client.get(f"/admin/v1/tenants/{acme.id}/deletion", headers=operator)
        assert receipt.json()["tenant_name"] == "acme"

    async def test_a_crash_half_way_is_finished_by_the_sweep(
        self,
        client: httpx.AsyncClient,
        platform: Platform,
        operator: dict[str, str],
        acme: Tenant,
        bench: Bench,
        clock: FrozenClock,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        await upload(client, platform, acme, "a", "b", "c")
        erase, calls = erasure.erase, 0

        async def dies_at_the_second(*arguments: object) -> object:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise OSError("the disk went away")
            return await erase(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(erasure, "erase", dies_at_the_second)
        assert (await delete(client, operator, acme)).status_code == 500
        monkeypatch.undo()
        clock.advance(seconds=10)
        assert await deletion.sweep(bench.resources) == 0
        assert stored(bench, acme) == 0
        path = f"/admin/v1/tenants/{acme.id}/deletion"
        receipt = (await client.get(path, headers=operator)).json()
        assert receipt["complete"] is True
        assert receipt["adapters"] == {"left": 0, "erased": 3, "pending": 0}

    async def test_a_crash_between_an_erasures_rows_and_its_files_is_finished_too(
        self,
        client: httpx.AsyncClient,
        platform: Platform,
        operator: dict[str, str],
        acme: Tenant,
        bench: Bench,
        clock: FrozenClock,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        await upload(client, platform, acme, "a")

        async def dies(*_: object) -> object:
            raise OSError("killed")

        monkeypatch.setattr(erasure, "carry_out", dies)
        assert (await delete(client, operator, acme)).status_code == 500
        monkeypatch.undo()
        assert stored(bench, acme) == 1
        clock.advance(seconds=10)
        assert await deletion.sweep(bench.resources) == 1
        await sweep_adapters(bench.resources)
        assert stored(bench, acme) == 0
        assert await deletion.sweep(bench.resources) == 0

    async def test_waits_for_an_engine_that_is_away_and_says_so(
        self,
        client: httpx.AsyncClient,
        platform: Platform,
        operator: dict[str, str],
        acme: Tenant,
        bench: Bench,
        clock: FrozenClock,
    ) -> None:
        await upload(client, platform, acme, "a")
        bench.engine.away = True
        receipt = (await delete(client, operator, acme)).json()
        assert receipt["adapters"] == {"left": 0, "erased": 0, "pending": 1}
        clock.advance(seconds=3600)
        assert await deletion.sweep(bench.resources) == 1
        bench.engine.away = False
        await sweep_adapters(bench.resources)
        assert await deletion.sweep(bench.resources) == 0

    async def test_one_deletion_that_cannot_go_on_stops_no_other(
        self,
        platform: Platform,
        client: httpx.AsyncClient,
        operator: dict[str, str],
        bench: Bench,
        clock: FrozenClock,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        stuck, fine = await make_tenant(platform, "stuck"), await make_tenant(platform, "fine")
        for tenant in (stuck, fine):
            await delete(client, operator, tenant, tenant.name)
        carry_on = deletion.carry_on

        async def fails_for_one(resources: object, tenant_id: str) -> object:
            if tenant_id == stuck.id:
                raise OSError("its folder cannot be read")
            return await carry_on(resources, tenant_id)  # type: ignore[arg-type]

        monkeypatch.setattr(deletion, "carry_on", fails_for_one)
        clock.advance(seconds=10)
        assert await deletion.sweep(bench.resources) == 1
        path = f"/admin/v1/tenants/{fine.id}/deletion"
        assert (await client.get(path, headers=operator)).json()["complete"] is True

    async def test_drops_uploads_that_wait_for_parts_with_what_they_have_sent(
        self,
        client: httpx.AsyncClient,
        platform: Platform,
        operator: dict[str, str],
        acme: Tenant,
        bench: Bench,
    ) -> None:
        key = bearer(await make_key(platform, acme))
        body = {"name": "late", "config_bytes": 2, "weights_bytes": 10}
        begun = (await client.post("/v1/uploads", json=body, headers=key)).json()
        sent = await client.put(f"/v1/uploads/{begun['id']}/parts/0", content=b"{}", headers=key)
        assert sent.status_code == 200
        assert list(bench.resources.store.uploads_with_parts()) == [begun["id"]]
        receipt = (await delete(client, operator, acme)).json()
        assert receipt["uploads_dropped"] == 1
        assert list(bench.resources.store.uploads_with_parts()) == []

    async def test_takes_what_a_transaction_that_began_before_it_has_added(
        self,
        client: httpx.AsyncClient,
        platform: Platform,
        operator: dict[str, str],
        acme: Tenant,
        bench: Bench,
        clock: FrozenClock,
    ) -> None:
        await delete(client, operator, acme)
        late = await make_key(platform, acme)  # `acme` was read before, and still looks alive
        user = await make_user(platform, acme)
        refused = await client.get("/v1/models", headers=bearer(late))
        assert refused.json()["error"]["code"] == "tenant_suspended"
        clock.advance(seconds=10)
        await deletion.sweep(bench.resources)
        shown = await client.get(f"/admin/v1/keys/{late.row.id}", headers=operator)
        assert shown.json()["state"] == "revoked"
        gone = await client.get(f"/admin/v1/users/{user.id}", headers=operator)
        assert gone.status_code == 404


class TestWhatStays:
    async def test_is_said_and_is_there(
        self,
        client: httpx.AsyncClient,
        platform: Platform,
        operator: dict[str, str],
        acme: Tenant,
        bench: Bench,
        clock: FrozenClock,
    ) -> None:
        await upload(client, platform, acme, "a")
        await delete(client, operator, acme)
        clock.advance(seconds=10)
        await deletion.sweep(bench.resources)
        receipt = await client.get(f"/admin/v1/tenants/{acme.id}/deletion", headers=operator)
        kept = receipt.text
        for what in ("ledger", "audit log", "backups"):
            assert what in kept
        log = await client.get(
            "/admin/v1/audit", headers=operator, params={"tenant_id": acme.id, "limit": 200}
        )
        actions = {event["action"] for event in log.json()["data"]}
        assert {"tenant.create", "tenant.delete", "adapter.erase", "tenant.erased"} <= actions
        keys = await client.get("/admin/v1/keys", headers=operator, params={"tenant_id": acme.id})
        assert [key["state"] for key in keys.json()["data"]] == ["revoked"]
