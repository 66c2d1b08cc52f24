"""/admin/v1/engines: what operators see of engines, and draining one."""

import pytest

from app.engines import repository, service
from tests.factories import bearer, make_key, make_tenant
from tests.fake_engine import FakeEngine
from tests.serving import install_engines


@pytest.fixture
def engines():
    return {"ipc://one": FakeEngine(), "ipc://two": FakeEngine()}


@pytest.fixture
def app(platform, engines):
    from app.main import create_app

    install_engines(platform, engines)
    return create_app(platform=platform)


@pytest.fixture
async def operator(client, platform):
    client.headers.update(bearer(await make_key(platform, None)))
    await platform.engines.refresh()
    await platform.engines.refresh()  # the first one noted them, the second one what they serve
    return client


async def listed(operator):
    body = (await operator.get("/admin/v1/engines")).json()
    return {engine["name"]: engine for engine in body["data"]}


async def test_engines_are_listed_with_what_they_do(operator, engines):
    found = await listed(operator)
    assert {e["address"] for e in found.values()} == set(engines)
    assert {e["state"] for e in found.values()} == {"ready"}
    assert {e["base_model"] for e in found.values()} == {"tiny-base"}
    assert found["engine-0"]["running"] == 0


async def test_a_drained_engine_is_told_so_and_a_resumed_one_too(operator, engines, platform):
    answer = await operator.post("/admin/v1/engines/engine-0/drain")
    assert answer.status_code == 200
    await platform.engines.refresh()
    assert (await listed(operator))["engine-0"]["state"] == "drained"
    assert engines["ipc://one"].held
    await operator.post("/admin/v1/engines/engine-0/resume")
    await platform.engines.refresh()
    assert not engines["ipc://one"].held
    assert (await listed(operator))["engine-0"]["state"] == "ready"


async def test_a_restart_does_not_lift_a_drain(operator, engines, platform):
    await operator.post("/admin/v1/engines/engine-0/drain")
    await platform.engines.refresh()
    engine = engines["ipc://one"]
    engine.held, engine.engine_id = False, "engine-anew"
    await platform.engines.refresh()
    assert engine.held


async def test_one_that_still_answers_is_draining_and_not_drained(operator, engines, platform):
    engines["ipc://one"].running = 2
    await operator.post("/admin/v1/engines/engine-0/drain")
    await platform.engines.refresh()
    assert (await listed(operator))["engine-0"]["state"] == "draining"


async def test_the_last_engine_of_a_base_is_drained_only_by_force(operator, platform):
    await operator.post("/admin/v1/engines/engine-0/drain")
    await platform.engines.refresh()
    refused = await operator.post("/admin/v1/engines/engine-1/drain")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "last_engine")
    assert (await operator.post("/admin/v1/engines/engine-1/drain?force=true")).status_code == 200


async def test_an_engine_that_is_away_says_why(operator, engines, platform):
    engines["ipc://one"].alive = False
    await platform.engines.refresh()
    found = (await listed(operator))["engine-0"]
    assert found["state"] == "unreachable"
    assert "ended" in found["problem"]
    assert found["running"] is None


async def test_an_unknown_engine_is_a_404(operator):
    answer = await operator.post("/admin/v1/engines/engine-9/drain")
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "engine")


async def test_tenants_see_no_engines(client, platform):
    key = await make_key(platform, await make_tenant(platform))
    assert (await client.get("/admin/v1/engines", headers=bearer(key))).status_code == 403


async def test_draining_leaves_an_audit_event(operator):
    await operator.post("/admin/v1/engines/engine-0/drain")
    await operator.post("/admin/v1/engines/engine-0/drain")
    events = (await operator.get("/admin/v1/audit?action=engine.drain")).json()["data"]
    assert [event["detail"]["name"] for event in events] == ["engine-0"]


async def test_an_engine_that_the_settings_forgot_is_gone(operator, platform, clock):
    router = platform.engines
    del router._engines["ipc://two"]
    assert (await listed(operator))["engine-1"]["state"] == "gone"


async def test_wishes_are_read_with_one_query_and_written_only_when_there_is_news(
    operator, platform, clock
):
    engines = platform.engines.all
    async with platform.db.reading() as session:
        before = {r.name: r.last_seen_at for r in await repository.everyone(session)}
    clock.advance(seconds=10)
    await service.wishes(platform.db, engines, clock.now())
    async with platform.db.reading() as session:
        assert {r.name: r.last_seen_at for r in await repository.everyone(session)} == before
    clock.advance(seconds=30)
    await service.wishes(platform.db, engines, clock.now())
    async with platform.db.reading() as session:
        after = {r.name: r.last_seen_at for r in await repository.everyone(session)}
    assert all(after[name] > before[name] for name in before)
