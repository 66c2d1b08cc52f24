"""How an api process ends after SIGTERM: readiness, refusals, running answers."""

import asyncio
import contextlib
import signal
import socket
from datetime import UTC, datetime

import httpx
import pytest
import uvicorn

from app.api_server import DrainingServer, server_options
from app.clock import FrozenClock
from app.draining import Drain
from tests.factories import bearer, make_key, make_tenant
from tests.fake_engine import FakeEngine
from tests.serving import install_engines, make_ready_adapter

CHAT = {"model": "support", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}


class TestStates:
    @pytest.fixture
    def clock(self):
        return FrozenClock(datetime(2026, 3, 14, tzinfo=UTC))

    @pytest.fixture
    def drain(self, clock):
        return Drain(clock, notice_s=5, grace_s=20)

    def test_nothing_is_refused_during_the_notice(self, drain, clock):
        assert not drain.begun
        drain.begin()
        clock.advance(seconds=4.9)
        assert (drain.begun, drain.refusing, drain.over) == (True, False, False)
        clock.advance(seconds=0.1)
        assert drain.refusing

    def test_it_is_over_once_nothing_runs(self, drain, clock):
        drain.in_flight = 1
        drain.begin()
        clock.advance(seconds=6)
        assert not drain.over
        drain.in_flight = 0
        assert drain.over

    def test_it_is_over_when_the_grace_is_spent(self, drain, clock):
        drain.in_flight = 1
        drain.begin()
        clock.advance(seconds=24.9)
        assert not drain.over
        clock.advance(seconds=0.1)
        assert drain.over

    def test_beginning_again_does_not_prolong_it(self, drain, clock):
        drain.begin()
        clock.advance(seconds=5)
        drain.begin()
        assert drain.refusing


class _Server(DrainingServer):
    @contextlib.contextmanager
    def capture_signals(self):
        yield


class TestTheServer:
    @pytest.fixture
    def engine(self):
        return FakeEngine()

    @pytest.fixture
    async def served(self, platform, engine):
        """The server, its task, and a client with a tenant's key."""
        from app.main import create_app

        install_engines(platform, {"ipc://fake": engine})
        app = create_app(platform=platform)
        tenant = await make_tenant(platform, "acme")
        await make_ready_adapter(platform, tenant, "support")
        key = await make_key(platform, tenant)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            server = _Server(
                uvicorn.Config(app, **server_options(platform.settings)), platform.drain
            )
            task = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
                await asyncio.sleep(0.01)
            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            async with httpx.AsyncClient(
                base_url=address, headers=bearer(key), timeout=60
            ) as client:
                await platform.engines.refresh()
                yield server, task, client
            server.should_exit = True
            await task

    async def test_a_stream_ends_whole_while_new_calls_are_refused(
        self, served, engine, clock, platform
    ):
        server, task, client = served
        engine.hold()
        stream = asyncio.create_task(
            client.post("/v1/chat/completions", json=CHAT | {"stream": True})
        )
        while not engine.requests:  # noqa: ASYNC110 - the fake counts them
            await asyncio.sleep(0.01)
        assert (await client.get("/readyz")).status_code == 200
        server.handle_exit(signal.SIGTERM, None)
        while not platform.drain.begun:  # noqa: ASYNC110 - at the server's next tick
            await asyncio.sleep(0.01)
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/v1/models")).status_code == 200  # the notice
        clock.advance(seconds=2)
        refused = await client.post("/v1/chat/completions", json=CHAT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) >= 1
        assert (await client.get("/healthz")).status_code == 200
        assert not task.done()
        engine.let(30)
        text = (await stream).text
        assert text.rstrip().endswith("data: [DONE]")
        assert '"error"' not in text
        await asyncio.wait_for(task, 10)

    async def test_an_answer_that_outlasts_the_grace_ends_with_an_error_frame(
        self, served, engine, clock, platform
    ):
        server, task, client = served
        engine.hold()
        stream = asyncio.create_task(
            client.post("/v1/chat/completions", json=CHAT | {"stream": True})
        )
        engine.let(2)
        while platform.drain.in_flight == 0:  # noqa: ASYNC110 - the gate counts
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        server.handle_exit(signal.SIGTERM, None)
        while not platform.drain.begun:  # noqa: ASYNC110 - at the server's next tick
            await asyncio.sleep(0.01)
        clock.advance(seconds=60)
        frames = [line for line in (await stream).text.splitlines() if line]
        assert '"error"' in frames[-2]
        assert frames[-1] == "data: [DONE]"
        await asyncio.wait_for(task, 10)
