"""The api on a real socket or in the process, with invented engines behind it."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI

from app.adapters.base_models import remember
from app.adapters.live_alias import follow_live
from app.adapters.models import Adapter, AdapterVersion
from app.engines import service as engine_registry
from app.ids import new_id
from app.inference.engines import Engine, EngineRouter
from app.platform import Platform
from app.tenants.models import Tenant
from tests.fake_engine import BASE_DIGEST, ByteCodec, FakeEngine


def install_engines(platform: Platform, engines: Mapping[str, FakeEngine]) -> EngineRouter:
    """Puts a router over these engines (by address) into the platform, not yet started."""

    async def note(description: object) -> None:
        await remember(platform.db, description, platform.clock.now())  # type: ignore[arg-type]

    async def wishes(known: Sequence[Engine]) -> dict[str, bool]:
        return await engine_registry.wishes(platform.db, known, platform.clock.now())

    router = EngineRouter(
        list(engines),
        [ByteCodec],  # type: ignore[list-item]
        lambda address: engines[address],
        note,
        wishes,
    )
    platform.engines = router
    return router


async def make_ready_adapter(
    platform: Platform,
    tenant: Tenant,
    name: str = "support",
    *,
    digest: str = "d1" * 32,
    base_digest: str = BASE_DIGEST,
) -> AdapterVersion:
    """A version that validation has accepted, with the alias `live` on it."""
    now = platform.clock.now()
    async with platform.db.transaction() as session:
        adapter = Adapter(
            id=new_id("adp"), tenant_id=tenant.id, name=name, created_by="tests", created_at=now
        )
        session.add(adapter)
        await session.flush()
        version = AdapterVersion(
            id=new_id("ver"),
            adapter_id=adapter.id,
            tenant_id=tenant.id,
            number=1,
            digest=digest,
            state="ready",
            config_bytes=100,
            weights_bytes=1000,
            rank=8,
            targets=["q_proj"],
            base_digest=base_digest,
            created_by="tests",
            created_at=now,
            updated_at=now,
            ready_at=now,
        )
        session.add(version)
        await session.flush()
        await follow_live(session, adapter.id, tenant.id, version.id, now)
    return version


async def add_version(
    platform: Platform, first: AdapterVersion, number: int, *, state: str = "ready"
) -> AdapterVersion:
    """Another version of the same adapter; no alias moves."""
    now = platform.clock.now()
    async with platform.db.transaction() as session:
        version = AdapterVersion(
            id=new_id("ver"),
            adapter_id=first.adapter_id,
            tenant_id=first.tenant_id,
            number=number,
            digest=f"{number:02x}" * 32,
            state=state,
            config_bytes=100,
            weights_bytes=1000,
            rank=8,
            targets=["q_proj"],
            base_digest=BASE_DIGEST,
            created_by="tests",
            created_at=now,
            updated_at=now,
            ready_at=now if state == "ready" else None,
        )
        session.add(version)
    return version


class _Server(uvicorn.Server):
    """Leaves the test's signal handlers alone, and ends as soon as it is told to."""

    async def main_loop(self) -> None:
        while not self.should_exit:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.005)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serve(app: FastAPI) -> AsyncIterator[str]:
    """Serves the app on a free port of 127.0.0.1; yields its address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=2)
        server = _Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
            if task.done():
                task.result()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task
