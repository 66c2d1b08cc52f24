"""`loramux serve`, and each of its processes alone: api, engine, worker, beat."""

import asyncio
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from pydantic import ValidationError

from app.config_check import check
from app.processes import (
    ProcessCommand,
    beat_command,
    engine_command,
    worker_command,
)
from app.settings import Settings, explain, get_settings

PortOption = Annotated[int | None, typer.Option(help="Port of the api and the console.")]
HostOption = Annotated[str | None, typer.Option(help="Address that the api listens on.")]
DataOption = Annotated[Path | None, typer.Option("--data-dir", help="Folder of the data.")]


def register(app: typer.Typer) -> None:
    """Adds these commands to the CLI."""
    for command in (serve, api, engine, worker, beat):
        app.command()(command)


def serve(port: PortOption = None, host: HostOption = None, data_dir: DataOption = None) -> None:
    """Run everything on this machine: engine, worker, beat and api, restarted when they fail."""
    from app.supervisor import CannotStart
    from app.supervisor import serve as run_platform

    elsewhere = other_commands_want(port=port, data_dir=data_dir)
    settings = _settings(port=port, host=host, data_dir=data_dir)
    if elsewhere:
        typer.echo(f"{'serve':<7}| in other terminals first: export {elsewhere}")
    try:
        asyncio.run(run_platform(settings))
    except CannotStart as error:
        _leave(str(error))


def other_commands_want(*, port: int | None, data_dir: Path | None) -> str:
    """The environment by which other commands find what these options moved; "" where they do."""
    moved = {"LORAMUX_PORT": port, "LORAMUX_DATA_DIR": data_dir and data_dir.absolute()}
    wanted = {name: str(value) for name, value in moved.items() if value is not None}
    return shlex.join(f"{n}={v}" for n, v in wanted.items() if os.environ.get(n) != v)


def api(port: PortOption = None, host: HostOption = None, data_dir: DataOption = None) -> None:
    """Run one api process: the tenant API, the operator API and the console."""
    from app.api_server import run

    run(_settings(port=port, host=host, data_dir=data_dir))


def engine(
    listen: Annotated[
        str | None,
        typer.Option(
            help="Address; default: the first of LORAMUX_ENGINES, or one below the data folder."
        ),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(help="Address to register, where clients reach it by another than --listen."),
    ] = None,
    data_dir: DataOption = None,
) -> None:
    """Run one serving engine."""
    settings = _settings(serves_http=False, data_dir=data_dir)
    if advertise is not None and settings.engine_registry_url is None:
        _leave("--advertise is for an engine that registers: set LORAMUX_ENGINE_REGISTRY_URL")
    address = listen or next(iter(settings.engines), settings.own_engine)
    _become(engine_command(settings, address, advertise=advertise))


def worker(data_dir: DataOption = None) -> None:
    """Run the Celery worker that validates adapters and rolls up usage."""
    _become(worker_command(_settings(serves_http=False, data_dir=data_dir)))


def beat(data_dir: DataOption = None) -> None:
    """Run Celery beat, which starts sweeps and roll-ups."""
    _become(beat_command(_settings(serves_http=False, data_dir=data_dir)))


def _settings(*, serves_http: bool = True, **options: object) -> Settings:
    """The settings, with the command line's options above the environment. Children inherit it.

    What is unsafe ends the command with a sentence, what may be better is said.
    """
    for name, value in options.items():
        if value is not None:
            os.environ[f"LORAMUX_{name.upper()}"] = str(value)
    get_settings.cache_clear()
    try:
        settings = get_settings()
    except ValidationError as error:
        _leave(explain(error))
    for problem in check(settings, serves_http=serves_http):
        if problem.severity == "refuse":
            _leave(f"{problem.message} ({problem.code})")
        typer.echo(f"warning: {problem.message} ({problem.code})", err=True)
    return settings


def _become(command: ProcessCommand) -> None:
    """Replaces this process, so that signals reach the command itself."""
    sys.stdout.flush()
    os.execv(command.argv[0], command.argv)


def _leave(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(1)
