"""What a `model` string runs: one resolver for calls and for the list."""

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import select

from app.adapters.live_alias import follow_live
from app.adapters.models import AdapterVersion
from app.adapters.resolution import ResolvedModel, list_models
from app.audit.models import AuditEvent
from app.caller import Caller
from app.errors import NotFound
from app.keys.service import NewKey
from app.platform import Platform
from app.tenants.models import Tenant
from tests.adapter_files import tiny_description
from tests.factories import bearer, make_caller, make_key, make_tenant
from tests.serving import add_version, make_ready_adapter
from tests.validation_bench import Bench, make_bench

BASE = tiny_description()


@pytest.fixture
async def tenant(platform: Platform) -> Tenant:
    return await make_tenant(platform)


@pytest.fixture
async def key(platform: Platform, tenant: Tenant) -> NewKey:
    return await make_key(platform, tenant)


@pytest.fixture
async def bench(app: FastAPI, platform: Platform, tenant: Tenant) -> Bench:
    """One tenant with the adapter `bot`: versions 1 and 2 ready, 3 still waiting."""
    bench = await make_bench(app)
    first = await make_ready_adapter(platform, tenant, "bot", base_digest=BASE.base_digest)
    second = await add_version(platform, first, 2)
    async with platform.db.transaction() as session:
        await follow_live(session, first.adapter_id, tenant.id, second.id, platform.clock.now())
    await add_version(platform, first, 3, state="uploaded")
    return bench


@pytest.fixture
def caller(platform: Platform, tenant: Tenant) -> Caller:
    return make_caller(platform, tenant)


async def resolve(
    platform: Platform, caller: Caller, model: str, request_id: str = "req_1"
) -> ResolvedModel:
    return await platform.names.for_call(caller, model, request_id=request_id)


async def refusal(platform: Platform, caller: Caller, model: str) -> dict[str, object]:
    with pytest.raises(NotFound) as refused:
        await resolve(platform, caller, model)
    assert refused.value.code == "model_not_found"
    return refused.value.body()


async def test_the_base_models_name_runs_the_base_model(
    platform: Platform, caller: Caller, bench: Bench
) -> None:
    found = await resolve(platform, caller, BASE.name)
    assert (found.ref, found.adapter_id, found.base_digest) == (None, None, BASE.base_digest)


@pytest.mark.parametrize(("model", "number"), [("bot", 2), ("bot@live", 2), ("bot@v1", 1)])
async def test_a_name_runs_live_or_the_version_it_names(
    model: str, number: int, platform: Platform, caller: Caller, tenant: Tenant, bench: Bench
) -> None:
    found = await resolve(platform, caller, model)
    assert (found.version_number, found.adapter_name) == (number, "bot")
    assert found.ref is not None
    assert (found.ref.salt, found.ref.digest) == (tenant.salt, found.digest)


async def test_an_adapters_id_runs_what_its_name_runs(
    platform: Platform, caller: Caller, bench: Bench
) -> None:
    by_name = await resolve(platform, caller, "bot")
    by_id = await resolve(platform, caller, by_name.adapter_id or "")
    assert by_id.version_id == by_name.version_id


async def test_a_canary_gets_its_share_and_a_request_keeps_its_version(
    platform: Platform,
    caller: Caller,
    client: httpx.AsyncClient,
    key: NewKey,
    bench: Bench,
) -> None:
    targets = [{"version": 1, "weight": 75}, {"version": 2, "weight": 25}]
    response = await client.put(
        "/v1/adapters/bot/aliases/canary", json={"targets": targets}, headers=bearer(key)
    )
    assert response.status_code == 200
    found = [
        (await resolve(platform, caller, "bot@canary", f"req_{n}")).version_number
        for n in range(200)
    ]
    again = [
        (await resolve(platform, caller, "bot@canary", f"req_{n}")).version_number
        for n in range(200)
    ]
    assert found == again
    assert 25 <= found.count(2) <= 75


async def test_foreign_unknown_and_erased_names_are_one_answer(
    platform: Platform, caller: Caller, client: httpx.AsyncClient, key: NewKey, bench: Bench
) -> None:
    stranger = make_caller(platform, await make_tenant(platform))
    models = ["bot", "bot@v1", "bot@canary"]
    foreign = [await refusal(platform, stranger, model) for model in models]
    await client.delete("/v1/adapters/bot", headers=bearer(key))
    erased = [await refusal(platform, caller, model) for model in models]
    assert foreign == erased
    identifier = "adp_" + "0" * 26
    async with platform.db.reading() as session:
        real = (await session.scalars(select(AdapterVersion.adapter_id))).first() or ""
    of_foreign = str(await refusal(platform, stranger, real)).replace(real, "ID")
    assert of_foreign == str(await refusal(platform, stranger, identifier)).replace(
        identifier, "ID"
    )


@pytest.mark.parametrize("model", ["../bot", "bot\0", "bot@v3\n", "b" * 10_000, "", "bot@v99"])
async def test_names_that_cannot_be_are_the_same_answer(
    model: str, platform: Platform, caller: Caller, bench: Bench
) -> None:
    await refusal(platform, caller, model)


async def test_an_own_version_that_is_not_ready_says_so_to_its_owner_alone(
    platform: Platform, caller: Caller, bench: Bench
) -> None:
    assert "waiting for validation" in str(await refusal(platform, caller, "bot@v3"))
    stranger = make_caller(platform, await make_tenant(platform))
    assert "validation" not in str(await refusal(platform, stranger, "bot@v3"))


async def test_a_key_beyond_its_scope_gets_the_same_answer_and_an_audit_event(
    platform: Platform, tenant: Tenant, caller: Caller, bench: Bench
) -> None:
    scoped = make_caller(platform, tenant, adapter_scope=frozenset({"another"}))
    stranger = make_caller(platform, await make_tenant(platform))
    assert await refusal(platform, scoped, "bot") == await refusal(platform, stranger, "bot")
    async with platform.db.reading() as session:
        events = (
            await session.scalars(select(AuditEvent).where(AuditEvent.action == "authz_fail"))
        ).all()
    assert [event.tenant_id for event in events] == [tenant.id]


class TestTheList:
    async def ids(self, platform: Platform, caller: Caller) -> set[str]:
        async with platform.db.reading() as session:
            return {entry.id for entry in await list_models(session, caller)}

    async def test_it_names_what_can_be_called(
        self, platform: Platform, caller: Caller, bench: Bench
    ) -> None:
        assert await self.ids(platform, caller) == {BASE.name, "bot", "bot@v1", "bot@v2"}

    @pytest.mark.parametrize(
        "scope", [None, frozenset({"bot"}), frozenset({BASE.name}), frozenset({"x"}), frozenset()]
    )
    async def test_it_and_the_calls_agree_for_every_scope(
        self,
        scope: frozenset[str] | None,
        platform: Platform,
        tenant: Tenant,
        client: httpx.AsyncClient,
        key: NewKey,
        bench: Bench,
    ) -> None:
        targets = [{"version": 1, "weight": 100}]
        await client.put(
            "/v1/adapters/bot/aliases/old", json={"targets": targets}, headers=bearer(key)
        )
        scoped = make_caller(platform, tenant, adapter_scope=scope)
        listed = await self.ids(platform, scoped)
        known = {BASE.name, "bot", "bot@old", "bot@v1", "bot@v2", "bot@v3", "bot@live@x", "x"}
        callable_now = set()
        for model in known:
            try:
                await resolve(platform, scoped, model)
            except NotFound:
                continue
            callable_now.add(model)
        assert listed == callable_now

    async def test_a_base_model_that_no_engine_serves_can_be_left_out(
        self, platform: Platform, caller: Caller, bench: Bench
    ) -> None:
        async with platform.db.reading() as session:
            listed = await list_models(session, caller, served=["another"])
        assert BASE.name not in {entry.id for entry in listed}
