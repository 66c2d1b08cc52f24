"""The command line of every process, from the settings: what `serve` supervises, and what the
commands of the same names run."""

import re
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from app.settings import Settings

_PYTHON = (sys.executable, "-P")  # -P: a folder named `engine` in the cwd is not the engine


@dataclass(frozen=True, slots=True)
class ProcessCommand:
    """`nice` is added to the niceness: the api answers first, then the engine computes."""

    name: str
    argv: tuple[str, ...]
    nice: int = 0


def curve_dir(settings: Settings) -> Path:
    """Where `secrets init` puts the CURVE keys."""
    return settings.root_secret_file.parent / "curve"


WORKER_SIGN_S = 5.0
"""How often a worker's consumer touches its file."""


def worker_sign(settings: Settings) -> Path:
    """The file that this host's worker touches while its loop turns."""
    return settings.data_dir / "run" / f"worker-{socket.gethostname()}.alive"


def beat_sign(settings: Settings) -> Path:
    """The file that beat touches each time it looks at its timetable."""
    return settings.data_dir / "run" / "beat.alive"


def local_engines(settings: Settings) -> list[str]:
    """Addresses that this machine serves itself; engines on tcp are started where they are."""
    named = [address for address in settings.engines if address.startswith("ipc://")]
    return named if settings.engines else [settings.own_engine]


def engine_command(
    settings: Settings, listen: str, *, advertise: str | None = None
) -> ProcessCommand:
    """One engine that listens on `listen`. It uses all cores (LORAMUX_ENGINE_THREADS), a little
    nicer than the api, which thus stays responsive even on a machine with few.

    The registry reaches it through the environment: its URL may have a password.
    """
    options: dict[str, object] = {
        "base-model": settings.base_model_of(listen),
        "data-dir": settings.data_dir,
        "store-url": settings.adapter_store_url,
        "listen": listen,
        "journal-path": settings.data_dir / "journal" / f"{_engine_name(settings, listen)}.jsonl",
        "arena-bytes": settings.arena_bytes,
        "host-cache-bytes": settings.host_cache_bytes,
        "max-rank": settings.max_rank,
        "max-choices": settings.max_choices,
        "max-waiting-per-tenant": settings.tenant_max_waiting,
        "backend": settings.engine_backend,
        "threads": settings.engine_threads,
        "drain-ms": settings.drain_grace_s * 1000,
    }
    if settings.tracing:
        options["tracing"] = "true"
    if listen.startswith("tcp://"):
        options["curve-dir"] = curve_dir(settings)
    if advertise is not None:
        options["advertise"] = advertise
    flags = [f"--{name}={value}" for name, value in options.items()]
    name = "engine" if len(local_engines(settings)) < 2 else _engine_name(settings, listen)
    return ProcessCommand(name, (*_PYTHON, "-m", "engine", *flags), nice=5)


def _engine_name(settings: Settings, listen: str) -> str:
    """Its number where the settings name it; engines that register may share a folder, so theirs
    is made from the address."""
    if listen in settings.engines or not settings.engine_registry_url:
        number = settings.engines.index(listen) if listen in settings.engines else 0
        return f"engine-{number}"
    place = listen.rpartition("/")[2].removesuffix(".sock")
    return "engine-" + re.sub(r"[^A-Za-z0-9-]+", "-", place.removeprefix("engine-"))


def worker_command(settings: Settings) -> ProcessCommand:
    """Celery's worker: one task at a time, in a process that is replaced now and then."""
    flags = ("--pool=prefork", "--concurrency=1", "--without-gossip", "--without-mingle")
    level = f"--loglevel={settings.log_level}"
    argv = (*_PYTHON, "-m", "celery", "--quiet", "-A", "app.worker", "worker", *flags, level)
    return ProcessCommand("worker", argv, nice=10)


def beat_command(settings: Settings) -> ProcessCommand:
    """Celery's timetable. Its memory of what ran when lies in the data folder."""
    schedule = f"--schedule={settings.data_dir / 'beat-schedule'}"
    flags = ("--scheduler=app.worker:Timetable", schedule, "--pidfile=")
    level = f"--loglevel={settings.log_level}"
    argv = (*_PYTHON, "-m", "celery", "--quiet", "-A", "app.worker", "beat", *flags, level)
    return ProcessCommand("beat", argv, nice=10)


def api_command(settings: Settings) -> ProcessCommand:
    """One api process; the settings reach it through the environment."""
    return ProcessCommand("api", (*_PYTHON, "-m", "app.api_server"))


def migrate_command(settings: Settings) -> ProcessCommand:
    """Brings the database's schema up to date, then ends."""
    code = "from app.db import migrate; from app.settings import get_settings; "
    return ProcessCommand(
        "migrate", (*_PYTHON, "-c", code + "migrate(get_settings().database_url)")
    )
