"""`loramux secrets`."""

from typing import Any

import typer
from sqlalchemy.ext.asyncio import AsyncSession

from app.cli.database import ACTOR, in_transaction, settings
from app.cli.output import JsonFlag, console, fail, print_json, print_rows, say
from app.crypto import FileSource, SecretError
from app.platform import Platform
from app.processes import curve_dir
from app.rotation import drop_drained, versions_in_use
from engine.client import CurveKeyError, create_curve_keys

app = typer.Typer(
    help="The root secret, and the keys between api and engine.", no_args_is_help=True
)


@app.command()
def init(as_json: JsonFlag = False) -> None:
    """Make the root secret and the CURVE keys for engines on tcp."""
    configured = settings()
    try:
        if configured.root_secret is None and not configured.root_secret_file.exists():
            FileSource(configured.root_secret_file).create()
        pair = create_curve_keys(curve_dir(configured))
    except (SecretError, CurveKeyError) as error:
        fail(str(error))
    folder = str(curve_dir(configured))
    if as_json:
        print_json({"folder": folder, "engine_public_key": pair.public})
        return
    console.print(f"The keys lie in {folder}; copy the folder to every host that needs them.")
    console.print(f"LORAMUX_ENGINE_PUBLIC_KEYS={pair.public}", soft_wrap=True, highlight=False)


@app.command()
def rotate(as_json: JsonFlag = False) -> None:
    """Add a new version of the root secret; hashes of the old one stay valid and are renewed."""
    configured = settings()
    if configured.root_secret is not None:
        fail("LORAMUX_ROOT_SECRET is set: put the new version before the old one, `2:new,1:old`")
    try:
        version = FileSource(configured.root_secret_file).rotate()
    except SecretError as error:
        fail(str(error))
    sentence = f"The root secret is at version {version}; running processes read it by and by."
    say(sentence, {"version": version}, as_json=as_json)


@app.command("list")
def list_(as_json: JsonFlag = False) -> None:
    """List the root secret's versions and how much still depends on each."""

    async def act(platform: Platform, session: AsyncSession) -> list[dict[str, Any]]:
        used = await versions_in_use(session, platform.clock.now())
        current = platform.secrets.current_version
        return [
            {"version": version, "signs": version == current, "depend": used.get(version, 0)}
            for version in platform.secrets.versions
        ]

    print_rows(in_transaction(act), ("version", "signs", "depend"), as_json=as_json, empty="")


@app.command()
def drop(version: int, as_json: JsonFlag = False) -> None:
    """Remove a version that nothing depends on any more; see `loramux secrets list`."""
    configured = settings()
    if configured.root_secret is not None:
        fail("LORAMUX_ROOT_SECRET is set: leave the version out of it, and restart the processes")
    source = FileSource(configured.root_secret_file)

    async def act(platform: Platform, session: AsyncSession) -> None:
        now = platform.clock.now()
        await drop_drained(session, source, version, now=now, actor=ACTOR)

    try:
        in_transaction(act)
    except SecretError as error:
        fail(str(error))
    gone = {"version": version, "dropped": True}
    say(f"version {version} of the root secret is gone", gone, as_json=as_json)
