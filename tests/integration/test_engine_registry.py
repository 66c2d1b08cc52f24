"""Engines that nobody named: one joins, is killed, and Redis goes and comes back."""

import asyncio
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import httpx
import pytest

from app.engines.registry import EngineRegistry
from app.inference.engines import EngineRouter
from app.inference.lifespan import connect_engine
from app.settings import Settings
from engine.curve import create_curve_keys
from tests.engine_process import EngineProcess, free_tcp_address
from tests.fake_engine import ByteCodec
from tests.live import LORAMUX, LivePlatform, free_port
from tests.own_redis import OwnRedis
from tests.tiny_base import write_tiny_base

pytestmark = [
    pytest.mark.redis,
    pytest.mark.timeout(240),
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server here"),
]
CALL = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}


@pytest.fixture
def store():
    opened = OwnRedis(Path(tempfile.mkdtemp(prefix="lmr"))).start()
    yield opened
    opened.kill()
    shutil.rmtree(opened.folder)


@pytest.fixture
def platform(store):
    folder = Path(tempfile.mkdtemp(prefix="lmx"))
    live = LivePlatform(
        folder / "data",
        free_port(),
        extra={
            "LORAMUX_BASE_MODEL": str(write_tiny_base(folder / "tiny")),
            "LORAMUX_ENGINE_REGISTRY_URL": store.url,
            "LORAMUX_ENGINE_LEASE_MS": "1500",
            "LORAMUX_ENGINE_THREADS": "1",
            "LORAMUX_ARENA_BYTES": str(32 * 2**20),
        },
    )
    live.start()
    try:
        yield live
    finally:
        live.stop()
        shutil.rmtree(folder)


def start_engine(live, name):
    address = f"ipc://{live.data_dir}/run/{name}.sock"
    with (live.data_dir / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [str(LORAMUX), "engine", "--listen", address],
            env=live.environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


async def until(condition, within_s=60.0):
    deadline = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < deadline, "it did not come to that"
        await asyncio.sleep(0.2)


async def test_an_engine_joins_is_killed_and_redis_comes_and_goes(platform, store):
    key = platform.tenant_with_key("acme")
    operator = platform.json("keys", "create", "--operator")["key"]
    async with httpx.AsyncClient(base_url=platform.url, timeout=60) as client:

        async def states():
            answer = await client.get(
                "/admin/v1/engines", headers={"authorization": f"Bearer {operator}"}
            )
            rows = answer.json()["data"]
            return {row["address"].rpartition("/")[2]: row["state"] for row in rows}

        async def calls(count=4):
            headers = {"authorization": f"Bearer {key}"}
            answers = [
                client.post("/v1/chat/completions", json=CALL, headers=headers)
                for _ in range(count)
            ]
            return {answer.status_code for answer in await asyncio.gather(*answers)}

        async def late_is(state):
            return (await states()).get("late.sock") == state

        assert list((await states()).values()) == ["ready"]  # the one that `serve` started
        assert await calls() == {200}

        late = start_engine(platform, "late")
        try:
            await until(lambda: late_is("ready"))
            own = next(name for name in await states() if name != "late.sock")
            await client.post(  # so that the late one has to answer
                f"/admin/v1/engines/{(await names(client, operator))[own]}/drain",
                headers={"authorization": f"Bearer {operator}"},
            )
            await until(lambda: is_state(states, own, "drained"))
            assert await calls() == {200}

            store.kill()  # both still answer, so nobody is forgotten
            await asyncio.sleep(2.5)
            assert await states() == {own: "drained", "late.sock": "ready"}
            assert await calls() == {200}
            store.start()  # with nothing in it

            await client.post(
                f"/admin/v1/engines/{(await names(client, operator))[own]}/resume",
                headers={"authorization": f"Bearer {operator}"},
            )
            await until(lambda: is_state(states, own, "ready"))
            late.kill()
            late.wait()
            assert await calls() <= {200, 503}  # one may have met its end
            await until(lambda: late_is("gone"))  # its lease has ended
            assert await calls() == {200}
        finally:
            late.kill()
            late.wait()

        again = start_engine(platform, "late")
        await until(lambda: late_is("ready"))
        again.terminate()
        assert again.wait(30) == 0
        await until(lambda: late_is("gone"))
        assert await calls() == {200}


async def test_over_tcp_only_an_engine_with_a_known_key_is_taken_on(
    tmp_path, store, settings, monkeypatch
):
    secrets = tmp_path / "data" / "secrets" / "curve"
    known = create_curve_keys(secrets)
    create_curve_keys(tmp_path / "foreign")  # a pair that the settings do not know
    monkeypatch.setenv("LORAMUX_ENGINE_REGISTRY_URL", store.url)
    monkeypatch.setenv("LORAMUX_ENGINE_PUBLIC_KEYS", known.public)
    opened = []
    for folder in (secrets, tmp_path / "foreign"):
        place = tmp_path / folder.name / "run"
        place.mkdir(mode=0o700, parents=True)
        engine = EngineProcess(place, curve_dir=folder)
        engine.address = free_tcp_address()
        opened.append(engine.start())
    trusted, foreign = opened
    settings = Settings(data_dir=tmp_path / "data")

    async def remember(_):
        return None

    registry = EngineRegistry(settings)
    router = EngineRouter(
        settings.engines,
        [ByteCodec],
        lambda address: connect_engine(settings, address, registry.public_key(address)),
        remember,
        registry=registry,
    )
    try:
        await router.start()

        async def both_are_seen():
            return any(e.client.alive for e in router.all) and bool(router.refused)

        await until(both_are_seen)
        assert [engine.address for engine in router.all] == [trusted.address]
        assert set(router.refused) == {foreign.address}
        assert "LORAMUX_ENGINE_PUBLIC_KEYS" in router.refused[foreign.address]
        trusted.signal(signal.SIGTERM)
        assert await trusted.exit_status() == 0

        async def it_has_left():
            return not router.all

        await until(it_has_left)
    finally:
        await router.close()
        for engine in opened:
            engine.stop()


async def is_state(states, name, state):
    return (await states()).get(name) == state


async def names(client, operator):
    answer = await client.get("/admin/v1/engines", headers={"authorization": f"Bearer {operator}"})
    return {row["address"].rpartition("/")[2]: row["name"] for row in answer.json()["data"]}
