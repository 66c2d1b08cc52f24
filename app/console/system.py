"""The operator's page of the system: what /readyz knows, versions, queue, ledger and journals."""

import asyncio
import platform as machine
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from fastapi import APIRouter, Request, Response

from app.adapters import operator as validations
from app.console.figures import size
from app.console.operator import Operator
from app.console.render import render
from app.db import head_revision
from app.deps import PlatformDep
from app.health import run_checks
from app.task_queue import queue_depth
from app.usage.open_repository import open_rows
from engine.types import PROTOCOL_VERSION

router = APIRouter(prefix="/console/system", include_in_schema=False)

TITLES = {
    "adapter_store": "Adapter store",
    "database": "Database",
    "engine": "Engines",
    "engine_registry": "Engine registry",
    "limits": "Limits",
    "queue": "Task queue",
}
MOST_FILES = 50


@dataclass(frozen=True, slots=True)
class HostFiles:
    """What lies on this api's disk: ended requests that wait for the database (`spooled`; `bad`:
    files that nobody can read) and the engines' journals by name with their size."""

    spooled: int
    bad: int
    journals: list[tuple[str, str]]


@router.get("")
async def system_page(request: Request, caller: Operator, platform: PlatformDep) -> Response:
    settings = platform.settings
    found = await run_checks(platform)
    async with platform.db.reading() as session:
        ledger = await open_rows(session, platform.clock.now())
        counts = await validations.count_validations(session)
    return render(
        request,
        "system.html",
        parts=[(TITLES.get(name, name), result) for name, result in found.items()],
        draining=platform.drain.begun,
        counts=counts,
        waiting_tasks=await queue_depth(settings),
        ledger=ledger,
        running=len(platform.ledger.running),
        files=await asyncio.to_thread(host_files, settings.data_dir),
        versions=_versions(settings.database_url),
        bases=sorted(base.name for base in platform.engines.served().values()),
    )


def host_files(data_dir: Path) -> HostFiles:
    """Blocks; call it in a thread."""
    spool, journals = data_dir / "spool", []
    for path in sorted((data_dir / "journal").glob("*.jsonl"))[:MOST_FILES]:
        try:
            journals.append((path.name, size(path.stat().st_size)))
        except FileNotFoundError:
            continue  # an engine has just replaced it
    return HostFiles(
        spooled=sum(1 for _ in spool.glob("*.json")),
        bad=sum(1 for _ in spool.glob("*.bad")),
        journals=journals,
    )


def _versions(database_url: str) -> list[tuple[str, str]]:
    return [
        ("loramux", version("loramux")),
        ("Engine protocol", str(PROTOCOL_VERSION)),
        ("Schema wanted", head_revision() or "none"),
        ("Database", "SQLite" if database_url.startswith("sqlite") else "PostgreSQL"),
        ("Python", machine.python_version()),
    ]
