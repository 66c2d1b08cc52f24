"""Dependencies of the routes: the platform, and one transaction a request."""

from collections.abc import AsyncIterator
from typing import Annotated, cast

from fastapi import Depends, Header, Request
from sqlalchemy.ext.asyncio import AsyncSession

from app.platform import Platform


# `async`, for FastAPI would run it in a thread otherwise.
async def get_platform(request: Request) -> Platform:
    return cast(Platform, request.app.state.platform)


PlatformDep = Annotated[Platform, Depends(get_platform)]


async def _transaction(platform: PlatformDep) -> AsyncIterator[AsyncSession]:
    async with platform.db.transaction() as session:
        yield session


async def _reading(platform: PlatformDep) -> AsyncIterator[AsyncSession]:
    async with platform.db.reading() as session:
        yield session


# `function`: it ends, and commits, before the answer is sent; so an answer is never about what
# was rolled back, and no stream holds a database session.
Session = Annotated[AsyncSession, Depends(_transaction, scope="function")]
ReadSession = Annotated[AsyncSession, Depends(_reading, scope="function")]

IdempotencyKey = Annotated[str | None, Header(alias="Idempotency-Key")]
"""Given by a client that may send a creating request twice; see app.idempotency."""
