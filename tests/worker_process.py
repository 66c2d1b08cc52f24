"""A real Celery worker, and a real engine process for its probes, as a test handles them.

`python -m tests.worker_process ADDRESS JOURNAL STEP_MS` serves the engine: invented tokens, the
small base model of `adapter_files`, the tokenizer of the packaged base model.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from app.processes import worker_command
from app.settings import Settings, packaged_base_model
from engine.server import EngineServer, ServerOptions
from engine.text import TextCodec
from engine.types import ModelDescription
from tests.adapter_files import tiny_description
from tests.engine_process import REPOSITORY, InventedCore


def served_description() -> ModelDescription:
    codec = TextCodec.load(packaged_base_model())
    return replace(tiny_description(), tokenizer_digest=codec.tokenizer_digest)


class Process:
    """A child in a process group of its own, so that it can be killed with its children."""

    def __init__(self, argv: list[str], log: Path, **environment: str) -> None:
        self.log = log
        with log.open("ab") as output:
            self.popen = subprocess.Popen(
                argv,
                cwd=REPOSITORY,
                env={**os.environ, **environment},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def children(self) -> list[int]:
        """Process ids of the direct children."""
        path = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def kill(self) -> None:
        """As `kill -9` of the process and all that it started does."""
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()


def environment(settings: Settings, **more: str) -> dict[str, str]:
    """The settings that matter to these tests, as a child process gets them."""
    return {
        "LORAMUX_DATA_DIR": str(settings.data_dir),
        "LORAMUX_DATABASE_URL": settings.database_url,
        "LORAMUX_ENGINES": settings.engines[0],
        "LORAMUX_BROKER_URL": settings.broker_url,
        "LORAMUX_VALIDATION_LEASE_S": str(settings.validation_lease_s),
        **more,
    }


def start_worker(settings: Settings) -> Process:
    argv = list(worker_command(settings).argv)
    return Process(argv, settings.data_dir / "worker.log", **environment(settings))


def start_engine(settings: Settings, step_ms: float) -> Process:
    address = settings.engines[0]
    Path(address.removeprefix("ipc://")).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "tests.worker_process", address]
    argv += [str(settings.data_dir / "engine.journal"), str(step_ms)]
    return Process(argv, settings.data_dir / "engine.log")


async def until(
    condition: Callable[[], Awaitable[bool]], *, timeout_s: float = 60.0, what: str = ""
) -> None:
    """Returns when `condition` holds; fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.1)


def main(argv: list[str]) -> None:
    server = EngineServer(
        ServerOptions(
            listen=argv[0],
            journal_path=Path(argv[1]),
            curve=None,
            beat_ms=50.0,
            client_timeout_ms=5000.0,
            drain_ms=100.0,
        )
    )
    server.serve(lambda: (InventedCore(step_ms=float(argv[2])), served_description()))


if __name__ == "__main__":
    main(sys.argv[1:])
