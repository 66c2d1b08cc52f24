"""Operator commands in this process, on a database of the test's own."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from app.cli import app as commands
from app.cli import database
from app.cli import secrets as secret_commands
from app.platform import Platform, open_platform
from app.settings import Settings

Run = Callable[..., Result]


@pytest.fixture
def run(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("keys", "list", …)`: one command; stdin as `input`."""
    for module in (database, secret_commands):
        name = "get_settings" if module is database else "settings"
        monkeypatch.setattr(module, name, lambda: settings)

    def run(*arguments: str, **options: Any) -> Result:
        return CliRunner().invoke(commands, list(arguments), **options)

    return run


def on_platform(settings: Settings, act: Callable[[Platform], Awaitable[Any]]) -> Any:
    """What `act` returns, on a platform that is open for it alone."""

    async def main() -> Any:
        platform = open_platform(settings)
        try:
            return await act(platform)
        finally:
            await platform.close()

    return asyncio.run(main())
