"""Operator commands: one transaction on the platform's database, refusals as sentences."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from app.cli.output import console, fail
from app.errors import AppError
from app.platform import Platform, open_platform
from app.settings import Settings, explain, get_settings

T = TypeVar("T")
ACTOR = "cli"
"""Who did it, in the audit log: whoever may read the data folder."""


def settings() -> Settings:
    """The settings; one that is not safe ends the command with its sentence."""
    try:
        return get_settings()
    except ValidationError as error:
        fail(explain(error))


def in_transaction(act: Callable[[Platform, AsyncSession], Awaitable[T]]) -> T:
    """Runs `act`, commits, and returns what it returned."""

    async def run() -> T:
        platform = open_platform(settings())
        try:
            async with platform.db.transaction() as session:
                return await act(platform, session)
        finally:
            await platform.close()

    try:
        return asyncio.run(run())
    except AppError as error:
        fail(f"{error.message} ({error.code})")
    except SQLAlchemyError as error:
        fail(
            f"the database {_shown(settings().database_url)} could not be used "
            f"({type(error).__name__}); has `loramux migrate` been run?"
        )


def migrate(revision: str = "head") -> None:
    """Bring the database's schema up to date (or to REVISION)."""
    from app.db import migrate as run

    try:
        run(settings().database_url, revision)
    except SQLAlchemyError as error:
        fail(f"the database could not be migrated ({type(error).__name__}): is it reachable?")
    console.print(f"the schema is at {revision}")


def _shown(url: str) -> str:
    """Without the password."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
