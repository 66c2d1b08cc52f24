"""Parts of the platform that /readyz looks at beside database and engines: Redis, queue, store."""

import asyncio
import os
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError

from app.platform import CheckResult, Platform, ReadinessCheck

CONNECT_S = 2.0


def checks(platform: Platform) -> dict[str, ReadinessCheck]:
    """By name. Without the limits no call is served; without queue or store nothing is uploaded;
    without the registry no engine joins, and those that answer serve on."""
    settings = platform.settings
    found: dict[str, ReadinessCheck] = {}
    if settings.redis_url:
        found["limits"] = redis_check(settings.redis_url, "Redis (limits)", needed=True)
    if settings.engine_registry_url:
        found["engine_registry"] = redis_check(
            settings.engine_registry_url, "the engine registry", needed=False
        )
    if settings.broker_url.startswith("redis"):
        found["queue"] = redis_check(settings.broker_url, "the broker", needed=False)
    elif settings.broker_url.startswith("filesystem:"):
        found["queue"] = folder_check(settings.data_dir / "broker", "the broker's folder")
    store = settings.adapter_store_url
    if store.startswith("file://"):
        found["adapter_store"] = folder_check(
            Path(store.removeprefix("file://")), "the adapters' folder"
        )
    return found


def redis_check(url: str, what: str, *, needed: bool) -> ReadinessCheck:
    """Whether it answers a ping."""

    async def check() -> CheckResult:
        client: Redis = Redis.from_url(
            url, socket_connect_timeout=CONNECT_S, socket_timeout=CONNECT_S
        )
        try:
            await client.ping()
        except (RedisError, OSError) as error:
            return CheckResult(False, f"{what} does not answer ({type(error).__name__})", needed)
        finally:
            await client.aclose()
        return CheckResult(True, f"{what} answers", needed)

    return check


def folder_check(folder: Path, what: str) -> ReadinessCheck:
    """Whether it can be written, or made where it is not there yet."""

    def look() -> CheckResult:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if not os.access(there, os.W_OK | os.X_OK):
            return CheckResult(False, f"{what} {folder} cannot be written", needed=False)
        return CheckResult(True, f"{what} can be written", needed=False)

    async def check() -> CheckResult:
        return await asyncio.to_thread(look)

    return check
