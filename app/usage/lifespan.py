"""Shows the rows that workers closed in /metrics while the app runs."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from app.platform import Platform
from app.scrape import SqlFigures
from app.usage import swept


@asynccontextmanager
async def lifespan(platform: Platform) -> AsyncIterator[None]:
    async with platform.shown(SqlFigures(platform.db, swept.read, swept.families)):
        yield
