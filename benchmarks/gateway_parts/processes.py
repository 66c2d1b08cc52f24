"""The processes of one run: the stub, loramux's api with a tenant ready to call, LiteLLM's proxy.

Each is pinned to a core and ends with this process, whatever ends that.
"""

import asyncio
import contextlib
import os
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from app.adapters.base_models import remember
from app.adapters.live_alias import follow_live
from app.adapters.models import Adapter, AdapterVersion
from app.caller import KeyLimits
from app.children import Child
from app.db import migrate
from app.ids import new_id
from app.keys.service import create_key
from app.platform import open_platform
from app.processes import ProcessCommand, api_command
from app.settings import Settings
from app.tenants.service import create_tenant
from benchmarks.gateway_parts.load import BadAnswer, Target
from benchmarks.gateway_parts.stub import NAME, describe
from engine.text import TextCodec

UP_S = 60.0
HIGH = 10**9
"""Limits that are counted and never reached."""
LIMITS = {
    "requests_per_minute": HIGH,
    "tokens_per_minute": HIGH,
    "max_concurrent": 10_000,
    "monthly_tokens": 10**12,
}


@dataclass(frozen=True)
class Proxy:
    """What is measured, and the process whose cost it is."""

    target: Target
    pid: int

    def cpu_s(self) -> float:
        """User and system time so far, of all its threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_mb(self) -> float:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@asynccontextmanager
async def running(
    name: str, argv: list[str], core: int, log: Path, **environment: str
) -> AsyncIterator[int]:
    """A child pinned to `core`, killed with all of its group at the end; yields its pid."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("LORAMUX_")}
    own = os.sched_getaffinity(0)
    with log.open("a") as lines:
        os.sched_setaffinity(0, {core})  # the child's threads have it from the start
        try:
            child = await Child.start(
                ProcessCommand(name, tuple(argv)),
                lambda _, line: print(line, file=lines),
                inherited | environment,
            )
        finally:
            os.sched_setaffinity(0, own)
        try:
            yield child.pid
        finally:
            child.kill()
            await child.wait()


async def answers(target: Target, request: bytes, log: Path) -> None:
    """Waits until a call is answered. Raises BadAnswer with the log's end after UP_S."""
    last: Exception | None = None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(UP_S):
            while True:
                try:
                    connection = await target.connect()
                    await connection.ask(request)
                    connection.close()
                    return
                except (OSError, BadAnswer) as error:
                    last = error
                    await asyncio.sleep(0.3)
    said = await asyncio.to_thread(log.read_text)
    raise BadAnswer(f"{target.name} does not answer: {last}\n{said[-3000:]}")


@asynccontextmanager
async def stub(folder: Path, core: int) -> AsyncIterator[tuple[str, int]]:
    """Yields its ZeroMQ address and its HTTP port."""
    address, port = f"ipc://{folder}/run/stub.sock", free_port()
    argv = [sys.executable, "-m", "benchmarks.gateway_parts.stub", address, str(port)]
    async with running("stub", argv, core, folder / "stub.log"):
        yield address, port


@asynccontextmanager
async def loramux(
    folder: Path, codec: TextCodec, engine: str, core: int, database_url: str | None
) -> AsyncIterator[Proxy]:
    """`loramux api` with a tenant, a key with limits and an adapter that is ready."""
    port = free_port()
    environment = {
        "LORAMUX_DATA_DIR": str(folder / "data"),
        "LORAMUX_PORT": str(port),
        "LORAMUX_ENGINES": engine,
    }
    if database_url is not None:
        environment["LORAMUX_DATABASE_URL"] = database_url
    settings = _settings(environment)
    migrate(settings.database_url)
    key = await _prepare(settings, codec)
    argv = list(api_command(settings).argv)
    log = folder / "loramux.log"
    async with running("loramux", argv, core, log, **environment) as pid:
        yield Proxy(Target("loramux", port, "gateway-bench", key), pid)


def _settings(environment: Mapping[str, str]) -> Settings:
    fields = {name.removeprefix("LORAMUX_").lower(): value for name, value in environment.items()}
    return Settings(**fields)  # type: ignore[arg-type]


async def _prepare(settings: Settings, codec: TextCodec) -> str:
    platform = open_platform(settings)
    now = platform.clock.now()
    description = describe(codec)
    await remember(platform.db, description, now)
    async with platform.db.transaction() as session:
        tenant = await create_tenant(
            session, name=f"bench-{secrets.token_hex(4)}", now=now, actor="bench", limits=LIMITS
        )
        await session.flush()
        key = await create_key(
            session,
            secrets=platform.secrets,
            now=now,
            actor="bench",
            tenant=tenant,
            limits=KeyLimits(**LIMITS),
        )
        adapter = Adapter(
            id=new_id("adp"),
            tenant_id=tenant.id,
            name="gateway-bench",
            created_by="bench",
            created_at=now,
        )
        session.add(adapter)
        await session.flush()
        version = AdapterVersion(
            id=new_id("ver"),
            adapter_id=adapter.id,
            tenant_id=tenant.id,
            number=1,
            digest="ad" * 32,
            state="ready",
            config_bytes=100,
            weights_bytes=1000,
            rank=8,
            targets=["q_proj"],
            base_digest=description.base_digest,
            created_by="bench",
            created_at=now,
            updated_at=now,
            ready_at=now,
        )
        session.add(version)
        await session.flush()
        await follow_live(session, adapter.id, tenant.id, version.id, now)
    await platform.close()
    return key.secret.text


@asynccontextmanager
async def bare(folder: Path, engine: str, core: int) -> AsyncIterator[Proxy]:
    """HTTP in, the engine's protocol out, and nothing of a platform: the floor of the api's way."""
    port = free_port()
    argv = [sys.executable, "-m", "benchmarks.gateway_parts.bare", engine, str(port)]
    async with running("bare", argv, core, folder / "bare.log") as pid:
        yield Proxy(Target("bare", port, NAME), pid)


@asynccontextmanager
async def litellm(python: Path, folder: Path, stub_port: int, core: int) -> AsyncIterator[Proxy]:
    """LiteLLM's proxy with one worker and a master key, in front of the stub's HTTP face."""
    port, key = free_port(), "sk-gateway-bench"
    config = folder / "litellm.yaml"
    config.write_text(
        "model_list:\n"
        f"  - model_name: {NAME}\n"
        "    litellm_params:\n"
        f"      model: openai/{NAME}\n"
        f"      api_base: http://127.0.0.1:{stub_port}/v1\n"
        "      api_key: none\n"
        "general_settings:\n"
        f"  master_key: {key}\n"
    )
    argv = [str(python.parent / "litellm"), "--config", str(config)]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    async with running(
        "litellm",
        argv,
        core,
        folder / "litellm.log",
        LITELLM_LOG="ERROR",
        LITELLM_LOCAL_MODEL_COST_MAP="True",
        LITELLM_TELEMETRY="False",
    ) as pid:
        yield Proxy(Target("litellm", port, NAME, key), pid)
