"""`loramux engines`: which there are, and draining one for an upgrade.

Works on the database, and asks the engines themselves how they are.
"""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from sqlalchemy.ext.asyncio import AsyncSession

from app.cli.database import ACTOR, in_transaction, settings
from app.cli.output import JsonFlag, console, fail, print_json, print_rows
from app.clock import SystemClock
from app.engines import service
from app.engines.models import EngineRecord
from app.engines.registry import EngineRegistry
from app.engines.schemas import EngineOut
from app.inference.engines import Engine
from app.platform import Platform
from app.settings import Settings
from engine.errors import EngineError

app = typer.Typer(help="List, drain and resume engines.", no_args_is_help=True)

ASK_S = 3.0
COLUMNS = ("name", "state", "base_model", "running", "waiting", "adapters_on_device", "address")
NameArgument = Annotated[str, typer.Argument(help="Name (engine-0), id or address.")]
EMPTY = "No engine has been seen yet: start one with `loramux engine`"


@app.command("list")
def list_(as_json: JsonFlag = False) -> None:
    """List the engines and what each does now."""
    print_rows(_rows(), COLUMNS, as_json=as_json, empty=EMPTY)


@app.command()
def drain(
    name: NameArgument,
    force: Annotated[bool, typer.Option(help="Also the last engine of a base model.")] = False,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", help="Wait so long until it runs nothing more.")
    ] = 0.0,
    as_json: JsonFlag = False,
) -> None:
    """Let an engine finish what it has and give it nothing new, until it is resumed."""
    before = _one(name)
    ready = [row for row in _rows() if row["state"] == "ready" and row["id"] != before["id"]]
    others = sum(row["base_digest"] == before["base_digest"] for row in ready)

    async def act(_: Platform, session: AsyncSession) -> None:
        row = await service.find_engine(session, name)
        if not force:
            service.refuse_to_drain_the_last(row, others)
        await service.set_drained(session, name, drained=True, actor=ACTOR)

    in_transaction(act)
    row = _one(name)
    clock = SystemClock()
    until_ms = clock.monotonic_ms() + wait * 1000
    while row["state"] == "draining" and clock.monotonic_ms() < until_ms:
        asyncio.run(asyncio.sleep(0.5))
        row = _one(name)
    if wait and row["state"] == "draining":
        fail(f"{row['name']} still runs {row['running']} requests after {wait:g} s")
    _tell(row, as_json=as_json)


@app.command()
def resume(name: NameArgument, as_json: JsonFlag = False) -> None:
    """Let an engine take requests again."""

    async def act(_: Platform, session: AsyncSession) -> None:
        await service.set_drained(session, name, drained=False, actor=ACTOR)

    in_transaction(act)
    _tell(_one(name), as_json=as_json)


def _tell(row: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(row)
        return
    wish = "takes no new requests" if row["drain_wanted"] else "takes requests"
    console.print(f"{row['name']} {wish}; its state is {row['state']}")


def _one(name: str) -> dict[str, Any]:
    found = [row for row in _rows() if name in (row["id"], row["name"], row["address"])]
    if not found:
        fail(f"there is no engine {name!r}; `loramux engines list` names them")
    return found[0]


def _rows() -> list[dict[str, Any]]:
    async def act(_: Platform, session: AsyncSession) -> list[EngineRecord]:
        return list(await service.list_engines(session))

    records = in_transaction(act)

    async def ask() -> list[EngineOut]:
        keys = await public_keys(settings())
        return await asyncio.gather(*(_ask(record, keys) for record in records))

    return [out.model_dump(mode="json") for out in asyncio.run(ask())]


async def public_keys(configured: Settings) -> dict[str, str | None]:
    """The engines that the settings name or that have registered; their trusted CURVE keys."""
    keys: dict[str, str | None] = dict.fromkeys(configured.engines)
    if configured.engine_registry_url:
        registry = EngineRegistry(configured)
        await registry.read()
        await registry.close()
        for address, found in registry.roll.engines.items():
            keys.setdefault(address, found.line.public_key)
    return keys


async def _ask(record: EngineRecord, keys: Mapping[str, str | None]) -> EngineOut:
    """The row, and the engine as it answers now."""
    from app.inference.lifespan import connect_engine

    configured = settings()
    if record.address not in keys:
        return EngineOut.of(record, None)
    client = connect_engine(configured, record.address, keys[record.address])
    engine = Engine(record.address, client)
    await engine.client.start()
    try:
        async with asyncio.timeout(ASK_S):
            engine.description = await engine.client.describe()
            engine.status = await engine.client.status()
        return EngineOut.of(record, engine)
    except (EngineError, TimeoutError) as error:
        engine.problem = str(error) or f"it does not answer within {ASK_S:g} s"
        return EngineOut.of(record, engine)
    finally:
        await engine.client.close()
