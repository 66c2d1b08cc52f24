"""`kill -9` in the middle of uploads and validations: every accepted upload still gets a verdict.

Real Celery workers, real brokers, a real engine process (its tokens are invented).
"""

import asyncio
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import select

from app.adapters import base_models, sweeps
from app.adapters.deps import get_resources
from app.adapters.models import AdapterVersion, Check, ValidationRun
from app.adapters.resources import Resources
from app.clock import SystemClock
from app.crypto import Passwords
from app.keys.service import NewKey
from app.main import create_app
from app.platform import Platform, open_platform
from app.settings import Settings
from engine.adapters.store import open_store
from tests.adapter_files import good_adapter, tiny_description
from tests.conftest import CHEAP_HASHER
from tests.factories import bearer, make_key, make_tenant
from tests.validation_bench import BOUNDARY, post_upload, upload_body
from tests.worker_process import (
    Process,
    environment,
    served_description,
    start_engine,
    start_worker,
    until,
)

BASE = tiny_description()
REDIS = "redis://127.0.0.1:6379/9"
LEASE_S = 3.0

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(
    params=["filesystem", pytest.param("redis", marks=[pytest.mark.redis, pytest.mark.wide])]
)
def broker_url(request: pytest.FixtureRequest) -> str:
    return "filesystem://" if request.param == "filesystem" else REDIS


@pytest.fixture
def settings(settings: Settings, broker_url: str, tmp_path: Path) -> Settings:
    engine = f"ipc:///tmp/loramux-test-{secrets.token_hex(4)}/e.sock"
    return settings.model_copy(
        update={
            "engines": [engine],
            "broker_url": broker_url,
            "validation_lease_s": LEASE_S,
        }
    )


@pytest.fixture
async def platform(settings: Settings) -> AsyncIterator[Platform]:
    """On the real clock: leases of other processes run by it."""
    opened = open_platform(settings, clock=SystemClock(), passwords=Passwords(CHEAP_HASHER))
    yield opened
    await opened.close()


@pytest.fixture
def app(platform: Platform) -> FastAPI:
    return create_app(platform=platform)


@pytest.fixture
async def resources(client: httpx.AsyncClient, app: FastAPI) -> Resources:
    """The app's own: its queue is the broker that the worker reads."""
    from starlette.requests import Request

    return await get_resources(Request({"type": "http", "app": app}))


@pytest.fixture
async def key(platform: Platform) -> NewKey:
    return await make_key(platform, await make_tenant(platform))


@pytest.fixture
def processes(settings: Settings) -> Iterator[list[Process]]:
    started: list[Process] = []
    if settings.broker_url == REDIS:
        import redis

        redis.Redis.from_url(REDIS).flushdb()
    yield started
    for process in started:
        process.kill()
    folder = Path(settings.engines[0].removeprefix("ipc://")).parent
    for file in folder.glob("*") if folder.exists() else ():
        file.unlink()
    if folder.exists():
        folder.rmdir()


async def state(platform: Platform) -> tuple[str, int]:
    """The one version's state, and how many of its checks are written."""
    async with platform.db.reading() as session:
        version = (await session.scalars(select(AdapterVersion))).one()
        return version.state, len((await session.scalars(select(Check))).all())


class TestWorker:
    async def test_an_upload_becomes_ready_through_the_broker(
        self,
        client: httpx.AsyncClient,
        key: NewKey,
        platform: Platform,
        resources: Resources,
        settings: Settings,
        processes: list[Process],
    ) -> None:
        processes += [start_engine(settings, 1.0), start_worker(settings)]
        response = await post_upload(client, key, good_adapter(BASE), "a")
        assert response.status_code == 202

        async def ready() -> bool:
            return (await state(platform))[0] == "ready"

        await until(ready, what="ready")
        listed = await client.get("/v1/adapters/a/versions/1", headers=bearer(key))
        assert [c["status"] for c in listed.json()["report"]["checks"]] == ["pass"] * 5

    @pytest.mark.parametrize(
        "victim", ["the worker", pytest.param("the task's process", marks=pytest.mark.wide)]
    )
    async def test_one_that_is_killed_in_the_middle_still_ends_in_a_verdict(
        self,
        victim: str,
        client: httpx.AsyncClient,
        key: NewKey,
        platform: Platform,
        resources: Resources,
        settings: Settings,
        processes: list[Process],
    ) -> None:
        engine, worker = start_engine(settings, 60.0), start_worker(settings)
        processes += [engine, worker]
        await post_upload(client, key, good_adapter(BASE), "a")

        async def probing() -> bool:
            return await state(platform) == ("validating", 4)

        await until(probing, what="the probes have begun")
        if victim == "the worker":
            worker.kill()
            processes.append(start_worker(settings))
        else:
            for child in worker.children():
                os.kill(child, signal.SIGKILL)
        engine.kill()
        processes.append(start_engine(settings, 1.0))

        async def ready() -> bool:
            await sweeps.sweep_validations(resources)
            return (await state(platform))[0] == "ready"

        assert (await state(platform))[0] == "validating"
        await until(ready, timeout_s=90, what="a verdict after the crash")
        async with platform.db.reading() as session:
            run = (await session.scalars(select(ValidationRun))).one()
        assert (run.state, run.attempts) == ("done", 2)


class TestBeat:
    @pytest.fixture
    def broker_url(self) -> str:
        return "filesystem://"

    async def test_its_sweep_sends_what_never_reached_the_broker(
        self,
        client: httpx.AsyncClient,
        key: NewKey,
        platform: Platform,
        resources: Resources,
        settings: Settings,
        processes: list[Process],
    ) -> None:
        from app.processes import beat_command

        await post_upload(client, key, good_adapter(BASE), "a")
        for message in (settings.data_dir / "broker" / "messages").iterdir():
            message.unlink()
        async with platform.db.transaction() as session:
            (await session.scalars(select(ValidationRun))).one().sent_at = None
        processes += [
            start_engine(settings, 1.0),
            start_worker(settings),
            Process(
                list(beat_command(settings).argv),
                settings.data_dir / "beat.log",
                **environment(settings),
            ),
        ]

        async def ready() -> bool:
            return (await state(platform))[0] == "ready"

        await until(ready, timeout_s=90, what="ready by beat's sweep")


class TestApi:
    @pytest.fixture
    def broker_url(self) -> str:
        return "filesystem://"

    async def test_one_that_is_killed_in_the_middle_of_an_upload_leaves_staging_alone(
        self,
        key: NewKey,
        platform: Platform,
        settings: Settings,
        processes: list[Process],
    ) -> None:
        await base_models.remember(platform.db, served_description(), platform.clock.now())
        port = _free_port()

        def start() -> Process:
            process = Process(
                [sys.executable, "-m", "app.api_server"],
                settings.data_dir / "api.log",
                **environment(settings, LORAMUX_PORT=str(port)),
            )
            processes.append(process)
            return process

        api = start()
        await until(lambda: _answers(port), what="the api answers")
        content = upload_body(good_adapter(BASE), "a")
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        headers = (
            f"POST /v1/adapters HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
            f"Authorization: {bearer(key)['authorization']}\r\n"
            f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        writer.write(headers.encode() + content[:-100])
        await writer.drain()
        store = open_store(settings.adapter_store_url)

        async def staged() -> bool:
            return bool(await asyncio.to_thread(store.list_staging_older_than, 0.0))

        await until(staged, what="the upload is being staged")
        api.kill()
        writer.close()
        assert list(store.refs()) == []
        async with platform.db.reading() as session:
            assert (await session.scalars(select(AdapterVersion))).all() == []
        assert await asyncio.to_thread(store.sweep, 0.0) == 1

        start()
        await until(lambda: _answers(port), what="the api answers again")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            response = await post_upload(client, key, good_adapter(BASE), "a")
        assert response.status_code == 202
        assert len(list(store.refs())) == 1


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


async def _answers(port: int) -> bool:
    async with httpx.AsyncClient(timeout=60) as client:
        try:
            return (await client.get(f"http://127.0.0.1:{port}/healthz")).status_code == 200
        except httpx.TransportError:
            return False
