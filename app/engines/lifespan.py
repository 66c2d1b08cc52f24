"""Shows the engines' figures in /metrics while the app runs."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from app.engines.metrics import EngineCollector
from app.metrics import REGISTRY
from app.platform import Platform


@asynccontextmanager
async def lifespan(platform: Platform) -> AsyncIterator[None]:
    collector = EngineCollector(lambda: platform.engines.all, platform.settings.metrics_tenants)
    REGISTRY.register(collector)
    try:
        yield
    finally:
        REGISTRY.unregister(collector)
