"""Calls of an engine that is drained or lost: what another engine takes over, and what ends."""

import asyncio

import httpx
import pytest
from sqlalchemy import select

from app.usage.models import UsageRecord
from engine.errors import EngineUnavailable
from engine.types import Residency
from tests.factories import bearer, make_key, make_tenant
from tests.fake_engine import BASE_DIGEST, FakeEngine, describe
from tests.serving import install_engines, make_ready_adapter, serve

CHAT = {"model": "support", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
OTHER = "c" * 64


@pytest.fixture
def engines():
    return {"ipc://one": FakeEngine(), "ipc://two": FakeEngine()}


@pytest.fixture
def app(platform, engines):
    from app.main import create_app

    install_engines(platform, engines)
    return create_app(platform=platform)


@pytest.fixture
async def api(app, platform):
    tenant = await make_tenant(platform, "acme")
    await make_ready_adapter(platform, tenant, "support")
    key = await make_key(platform, tenant)
    async with (
        serve(app) as address,
        httpx.AsyncClient(base_url=address, headers=bearer(key), timeout=20) as client,
    ):
        await platform.engines.refresh()
        yield client


def home_of(engines):
    """The engine that has the request, and the other one."""
    first, second = engines.values()
    return (first, second) if first.requests else (second, first)


async def started(engines):
    while not any(engine.requests for engine in engines.values()):  # noqa: ASYNC110 - fakes
        await asyncio.sleep(0.01)


async def rows(platform):
    await platform.ledger.drain()
    async with platform.db.reading() as session:
        return list(await session.scalars(select(UsageRecord)))


async def test_a_request_that_an_engine_refuses_to_begin_runs_on_the_other(api, engines, platform):
    (await api.post("/v1/chat/completions", json=CHAT)).raise_for_status()
    first, second = home_of(engines)
    first.ending = True  # and this api process has not heard of it yet
    answer = await api.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 200
    assert len(second.requests) == 1
    places = {row.engine for row in await rows(platform)}
    assert places == set(engines)


async def test_one_row_names_the_engine_that_ran_the_request(api, engines, platform):
    addresses = {id(engine): address for address, engine in engines.items()}
    for engine in engines.values():
        engine.ending = True
    (refused,) = [await api.post("/v1/chat/completions", json=CHAT)]
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert int(refused.headers["retry-after"]) >= 1
    engines["ipc://two"].ending = False
    (await api.post("/v1/chat/completions", json=CHAT)).raise_for_status()
    row = next(row for row in await rows(platform) if row.status == "completed")
    assert row.engine == addresses[id(engines["ipc://two"])]


async def test_a_lost_engines_stream_ends_with_an_error_frame_and_the_next_call_runs(api, engines):
    for engine in engines.values():
        engine.hold()
        engine.fail_at = (2, EngineUnavailable("the engine's process has ended"))
    streaming = asyncio.create_task(
        api.post("/v1/chat/completions", json=CHAT | {"stream": True}),
    )
    await started(engines)
    lost, other = home_of(engines)
    lost.let(5)
    other.gate, other.fail_at = None, None
    answer = await streaming
    frames = [line for line in answer.text.splitlines() if line]
    assert '"code":"engine_unavailable"' in frames[-2]
    assert frames[-1] == "data: [DONE]"
    lost.alive = False
    assert (await api.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_what_has_begun_is_never_begun_again_elsewhere(api, engines):
    for engine in engines.values():
        engine.refuse = EngineUnavailable("it died with the request")
    answer = await api.post("/v1/chat/completions", json=CHAT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert sum(len(engine.requests) for engine in engines.values()) == 1


async def test_calls_follow_the_adapter(api, engines, platform):
    (await api.post("/v1/chat/completions", json=CHAT)).raise_for_status()
    first, second = home_of(engines)
    second.adapters = [Residency(first.requests[0].adapter, "device", 1000, 0)]
    await platform.engines.refresh()
    for _ in range(3):
        (await api.post("/v1/chat/completions", json=CHAT)).raise_for_status()
    assert (len(first.requests), len(second.requests)) == (1, 3)


class TestTwoBaseModels:
    @pytest.fixture
    def engines(self):
        other = FakeEngine(description=describe(name="other-base", base_digest=OTHER))
        return {"ipc://one": FakeEngine(), "ipc://two": other}

    async def test_both_are_listed_and_each_is_answered_by_its_own_engine(self, api, engines):
        listed = {model["id"] for model in (await api.get("/v1/models")).json()["data"]}
        assert {"tiny-base", "other-base", "support"} <= listed
        for model, address in (("tiny-base", "ipc://one"), ("other-base", "ipc://two")):
            answer = await api.post("/v1/chat/completions", json=CHAT | {"model": model})
            assert answer.status_code == 200
            assert [r.adapter for r in engines[address].requests] == [None]

    async def test_an_adapter_runs_on_engines_of_its_base_alone(self, api, engines):
        engines["ipc://one"].alive = False
        answer = await api.post("/v1/chat/completions", json=CHAT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
        assert engines["ipc://two"].requests == []
        assert BASE_DIGEST != OTHER
