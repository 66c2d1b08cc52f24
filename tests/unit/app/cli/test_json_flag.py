"""Every command speaks JSON too, but for those that run until they are stopped."""

from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from app.cli import app

NO_DOCUMENT = {"serve", "api", "engine", "worker", "beat", "migrate", "health"}
"""Processes; and two whose answer is their exit code."""


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, found in group.commands.items():
        if hasattr(found, "commands"):
            yield from commands(found, (*path, name))
        else:
            yield " ".join((*path, name)), found


def test_every_command_has_it() -> None:
    lacking = {
        name
        for name, command in commands(get_command(app))
        if not any("--json" in option.opts for option in command.params)
    }
    assert lacking == NO_DOCUMENT
