"""Opens and closes what calls need: engines, limits, ledger. Api and worker use it alike."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache, partial
from pathlib import Path

import structlog

from app.adapters.base_models import remember
from app.db import to_its_end
from app.engines import service as engine_rows
from app.engines.registry import EngineRegistry
from app.inference.engines import Engine, EngineLink, EngineRouter
from app.limits.open import open_limits
from app.limits.service import Limits
from app.platform import CheckResult, Platform, ReadinessCheck
from app.processes import curve_dir
from app.settings import Settings
from app.tenants.deletion import end_calls_of_deleted
from app.usage.metrics import usage_metrics
from app.usage.service import Ledger
from app.usage.spool import Spool
from engine.client import EngineClient, load_client_curve
from engine.text import TextCodec
from engine.tool_format import ToolSetting
from engine.types import ModelDescription

TICK_S = 5.0
FIRST_WORD_S = 2.0
"""Before calls are taken: so that the first ones find the engines that are there."""

log = structlog.get_logger(__name__)


@asynccontextmanager
async def lifespan(platform: Platform) -> AsyncIterator[None]:
    """Sets `platform.engines`, `.limits` and `.ledger`; what a test has set stays."""
    engines = platform.engines = platform.engines or open_router(platform)
    limits = platform.limits = platform.limits or open_limits(
        platform.settings.redis_url, platform.clock
    )
    ledger = platform.ledger = platform.ledger or open_ledger(platform)
    platform.checks["engine"] = _engine_check(engines)
    platform.checks["limits"] = _limits_check(limits)
    await engines.start(wait_s=FIRST_WORD_S)
    await limits.start()
    await ledger.start()
    ticker = asyncio.create_task(_tick(platform), name="ledger-tick")
    try:
        yield
    finally:
        ticker.cancel()
        await asyncio.gather(ticker, return_exceptions=True)
        await ledger.close()
        await limits.close()
        await engines.close()


def open_router(platform: Platform) -> EngineRouter:
    """The engines that the settings name and those that register; connects when it is started."""
    settings = platform.settings
    registry = EngineRegistry(settings) if settings.engine_registry_url else None

    def connect(address: str) -> EngineLink:
        registered = registry.public_key(address) if registry is not None else None
        return connect_engine(settings, address, registered)

    async def note(description: ModelDescription) -> None:
        await to_its_end(remember(platform.db, description, platform.clock.now()))

    async def wishes(engines: Sequence[Engine]) -> dict[str, bool]:
        now = platform.clock.now()
        return await to_its_end(engine_rows.wishes(platform.db, engines, now))

    return EngineRouter(
        settings.engines,
        [partial(load_codec, path, settings.tool_format) for path in settings.base_models],
        connect,
        note,
        wishes,
        registry,
    )


def open_ledger(platform: Platform, *, scraped: bool = True) -> Ledger:
    """`scraped`: whether this process has a /metrics, as an api has and a worker has not."""

    async def acknowledge(engine: str, request_ids: list[str]) -> None:
        await platform.engines.acknowledge(engine, request_ids)

    metrics = usage_metrics()
    metrics.tenants.places = platform.settings.metrics_tenants
    metrics.adapters.places = platform.settings.metrics_adapters
    return Ledger(
        platform.db,
        platform.clock,
        Spool(platform.settings.data_dir / "spool"),
        metrics,
        lease_s=platform.settings.ledger_lease_s,
        acknowledge=acknowledge,
        scraped=scraped,
    )


@lru_cache(maxsize=8)
def load_codec(base_model: Path, tool_format: ToolSetting = "auto") -> TextCodec:
    """The base model's tokenizer and chat format, read once a process."""
    return TextCodec.load(base_model, tool_format=tool_format)


def connect_engine(settings: Settings, address: str, registered: str | None = None) -> EngineLink:
    """`registered`: the trusted public key of an engine on tcp that the settings do not name.

    Raises CurveKeyError where this host has no keys of its own.
    """
    if not address.startswith("tcp://"):
        return EngineClient(address)
    if address in settings.engines:
        public_key = settings.engine_public_keys[settings.engines.index(address)]
    else:
        public_key = registered or ""
    return EngineClient(address, curve=load_client_curve(curve_dir(settings), public_key))


def _engine_check(engines: EngineRouter) -> ReadinessCheck:
    async def check() -> CheckResult:
        problem = engines.problem()
        return CheckResult(problem is None, problem or "an engine is ready")

    return check


def _limits_check(limits: Limits) -> ReadinessCheck:
    async def check() -> CheckResult:
        problem = limits.problem()
        return CheckResult(problem is None, problem or "limits are counted")

    return check


async def _tick(platform: Platform) -> None:
    while True:
        await asyncio.sleep(TICK_S)
        try:
            await to_its_end(platform.ledger.tick())
            await platform.limits.renew_seats()
            await to_its_end(end_calls_of_deleted(platform))
        except Exception as error:  # noqa: BLE001 - leases must be renewed whatever happened once
            log.warning("tick_failed", error=type(error).__name__)
