"""Figures that /metrics reads from SQL at every scrape: what no single process has counted.

Every api process shows the same ones, so aggregate over processes with max, not sum. While the
database does not answer they are left out.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Generic, TypeVar

import structlog
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from app.db import Database

TIMEOUT_S = 3.0
Found = TypeVar("Found")
_log = structlog.get_logger("loramux.api")


class SqlFigures(Collector, Generic[Found]):
    """`query` runs before a scrape, `show` turns what it found into families."""

    def __init__(
        self,
        db: Database,
        query: Callable[[AsyncSession], Awaitable[Found]],
        show: Callable[[Found], Iterable[Metric]],
    ) -> None:
        self._db = db
        self._query = query
        self._show = show
        self._found: Found | None = None

    async def read(self) -> None:
        """Never raises for a database that is away."""
        self._found = None
        try:
            async with asyncio.timeout(TIMEOUT_S), self._db.reading() as session:
                self._found = await self._query(session)
        except (SQLAlchemyError, OSError, TimeoutError) as error:
            _log.warning("figures_not_read", error=type(error).__name__)

    def collect(self) -> Iterator[Metric]:
        if self._found is not None:
            yield from self._show(self._found)
