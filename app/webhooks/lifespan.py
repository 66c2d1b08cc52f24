"""Shows the webhooks' figures in /metrics while the app runs."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy.ext.asyncio import AsyncSession

from app.platform import Platform
from app.scrape import SqlFigures
from app.webhooks import metrics


@asynccontextmanager
async def lifespan(platform: Platform) -> AsyncIterator[None]:
    async def read(session: AsyncSession) -> metrics.Figures:
        return await metrics.read(session, platform.clock.now())

    async with platform.shown(SqlFigures(platform.db, read, metrics.families)):
        yield
