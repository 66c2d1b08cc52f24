"""A whole installation of real processes, each of which can be killed and started again.

Redis and PostgreSQL are its own (free ports, a folder of its own); nothing outlives `stop`.
"""

import os
import pwd
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psycopg

from app.db import migrate
from app.processes import beat_command, worker_command
from app.settings import Settings
from tests.live import free_port
from tests.own_redis import OwnRedis
from tests.worker_process import Process

UP_S = 30.0


class OwnPostgres:
    """A cluster of its own, made by initdb as the user postgres (who may not be root)."""

    def __init__(self) -> None:
        self.port = free_port()
        self.folder = Path("/tmp") / f"loramux-pg-{secrets.token_hex(4)}"
        self.process: subprocess.Popen[bytes] | None = None
        self._user = "postgres" if os.getuid() == 0 else None
        self.folder.mkdir(mode=0o700)
        if self._user is not None:
            owner = pwd.getpwnam(self._user)
            os.chown(self.folder, owner.pw_uid, owner.pw_gid)
        self._run(["initdb", "-D", str(self.folder), "-A", "trust", "-U", "postgres", "--no-sync"])

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                *(_server("postgres"), "-D", str(self.folder), "-p", str(self.port)),
                *("-h", "127.0.0.1", "-k", str(self.folder)),
            ],
            user=self._user,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until(self._answers, "PostgreSQL")

    def kill(self) -> None:
        """As `kill -9` of the postmaster does; its children end by themselves."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
            until(lambda: not _open(self.port), "PostgreSQL's end")

    def remove(self) -> None:
        self.kill()
        time.sleep(0.5)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.url, connect_timeout=2).close()
        except psycopg.OperationalError:
            if self.process is not None and self.process.poll() is not None:
                self.start()  # remains of the killed one were in the way
            return False
        return True

    def _run(self, argv: list[str]) -> None:
        argv[0] = _server(argv[0])
        subprocess.run(argv, user=self._user, check=True, capture_output=True, cwd="/tmp")


def _server(name: str) -> str:
    """A program of the server's, which distributions keep off the path."""
    found = shutil.which(name)
    if found is None:
        found = str(max(Path("/usr/lib/postgresql").glob(f"*/bin/{name}")))
    return found


class Stack:
    """`start_*` and `kill(name)`; names are api-0, api-1, engine, worker, beat, redis, postgres."""

    def __init__(
        self,
        folder: Path,
        *,
        apis: int = 1,
        step_ms: float = 5.0,
        postgres: OwnPostgres | None = None,
        **environment: str,
    ) -> None:
        self.folder = folder
        self.step_ms = step_ms
        self.redis = OwnRedis(folder / "redis")
        self.postgres = postgres
        self.counts = folder / "counts"
        self.ports = [free_port() for _ in range(apis)]
        self.sockets = Path("/tmp") / f"loramux-{secrets.token_hex(4)}"
        self.sockets.mkdir(mode=0o700)
        self.settings = Settings(
            data_dir=folder / "data",
            database_url=postgres.url if postgres else f"sqlite:///{folder}/data/loramux.db",
            redis_url=self.redis.url,
            engines=[f"ipc://{self.sockets}/e.sock"],
        )
        (folder / "data").mkdir(parents=True, exist_ok=True)
        self._environment = {
            "LORAMUX_DATA_DIR": str(self.settings.data_dir),
            "LORAMUX_DATABASE_URL": self.settings.database_url,
            "LORAMUX_REDIS_URL": self.redis.url,
            "LORAMUX_ENGINES": self.settings.engines[0],
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        self._processes: dict[str, Process] = {}

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def start(self, *, worker: bool = False) -> None:
        """Everything, and returns when the apis are ready."""
        self.redis.start()
        if self.postgres is not None:
            self.postgres.start()
        migrate(self.settings.database_url)
        names = ["engine", *(f"api-{n}" for n in range(len(self.ports)))]
        for name in names + (["worker", "beat"] if worker else []):
            self.start_process(name)
        for port in self.ports:
            until(lambda port=port: _ready(port), "the api", 90)  # type: ignore[misc]

    def start_process(self, name: str) -> None:
        if name == "redis":
            self.redis.start()
        elif name == "postgres":
            assert self.postgres is not None
            self.postgres.start()
        else:
            extra = {}
            if name.startswith("api"):
                extra["LORAMUX_PORT"] = str(self.ports[int(name[4:])])
            log = self.folder / f"{name}.log"
            self._processes[name] = Process(self._argv(name), log, **self._environment, **extra)

    def kill(self, name: str) -> None:
        """As `kill -9` does."""
        if name == "redis":
            self.redis.kill()
        elif name == "postgres":
            assert self.postgres is not None
            self.postgres.kill()
        else:
            self._processes[name].kill()

    def running(self, name: str) -> bool:
        return self._processes[name].popen.poll() is None

    def stop(self) -> None:
        for process in self._processes.values():
            process.kill()
        self.redis.kill()
        if self.postgres is not None:
            self.postgres.remove()
        shutil.rmtree(self.sockets, ignore_errors=True)

    def engine_counts(self) -> dict[str, int]:
        """Tokens of every request, as the engine itself made them."""
        counts: dict[str, int] = {}
        for line in self.counts.read_text().splitlines():
            request_id, made = line.split()
            counts[request_id] = counts.get(request_id, 0) + int(made)
        return counts

    def _argv(self, name: str) -> list[str]:
        if name == "engine":
            journal = self.folder / "data" / "journal" / "engine.jsonl"
            command = [sys.executable, "-m", "tests.core_process", self.settings.engines[0]]
            return [*command, str(journal), str(self.step_ms), str(self.counts)]
        if name == "worker":
            return list(worker_command(self.settings).argv)
        if name == "beat":
            return list(beat_command(self.settings).argv)
        return [sys.executable, "-m", "app.api_server"]


def _open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=0.5).close()
    except OSError:
        return False
    return True


def _ready(port: int) -> bool:
    import httpx

    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=2.0).status_code == 200
    except httpx.HTTPError:
        return False


def until(condition: Callable[[], bool], what: str, within_s: float = UP_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s:g} s: {what}")
        time.sleep(0.1)
