"""`loramux health`: is one process of this platform doing its work? For container health checks."""

import asyncio
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import httpx
import typer

from app.cli.database import settings
from app.cli.output import console, fail
from app.clock import SystemClock
from app.processes import beat_sign, worker_sign
from app.settings import Settings

TIMEOUT_S = 8.0


class Process(StrEnum):
    api = "api"
    engine = "engine"
    worker = "worker"
    beat = "beat"


def health(
    process: Process,
    listen: Annotated[
        str | None, typer.Option(help="Which engine; default: the one that `loramux engine` runs.")
    ] = None,
) -> None:
    """Exit status 0 when the PROCESS (api, engine, worker, beat) on this host is well."""
    configured = settings()
    if process is Process.engine:
        first = next(iter(configured.engines), configured.own_engine)
        problem = _engine(configured, listen or first)
    elif listen is not None:
        fail("--listen names an engine; leave it out for other processes")
    else:
        check = {Process.api: _api, Process.worker: _worker, Process.beat: _beat}[process]
        problem = check(configured)
    if problem:
        fail(f"{process.value}: {problem}")
    console.print(f"{process.value} is well")


def _api(configured: Settings) -> str:
    from app.supervisor import api_url

    url = f"{api_url(configured)}/healthz"
    try:
        answer = httpx.get(url, timeout=TIMEOUT_S, trust_env=False)
    except httpx.HTTPError as error:
        return f"{url} does not answer ({type(error).__name__})"
    return "" if answer.status_code == 200 else f"{url} answers {answer.status_code}"


def _engine(configured: Settings, address: str) -> str:
    from app.cli.engines import public_keys
    from app.inference.lifespan import connect_engine
    from engine.errors import EngineError

    keys = asyncio.run(public_keys(configured))
    if address not in keys and address != configured.own_engine:
        return f"{address} is neither among LORAMUX_ENGINES nor registered"

    async def describe() -> None:
        client = connect_engine(configured, address, keys.get(address))
        await client.start()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await client.describe()
        finally:
            await client.close()

    try:
        asyncio.run(describe())
    except (EngineError, TimeoutError) as error:
        return f"{address} does not answer ({error or type(error).__name__})"
    return ""


def _worker(configured: Settings) -> str:
    return _stale(worker_sign(configured), configured.worker_hang_s)


def _beat(configured: Settings) -> str:
    return _stale(beat_sign(configured), configured.beat_hang_s)


def _stale(file: Path, after_s: float) -> str:
    try:
        age_s = SystemClock().now().timestamp() - file.stat().st_mtime
    except FileNotFoundError:
        return f"there is no {file}"
    return "" if age_s < after_s else f"{file} was last touched {age_s:.0f} s ago"
