"""Runs the checks of an adapter's files in a child process with limits, one JSON line a group.

The child (`app.adapters.check_child`) limits itself before it opens anything: address space, CPU
seconds, no file may be written, and it dies with its parent. It gets no secret in its environment.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from app.adapters.outcome import CheckOutcome
from engine.types import ModelDescription

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
LINE_BYTES = 4 * 1024 * 1024
FAULT_SIGNALS = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT}
)
"""A parser that dies of these was brought down by what it read."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one child may use."""

    memory_bytes: int
    cpu_s: int
    wall_s: float


@dataclass(frozen=True, slots=True)
class Job:
    """What the child is told, on its standard input."""

    folder: str  # holds adapter_config.json and adapter_model.safetensors
    description: ModelDescription
    max_rank: int
    max_bytes: int
    memory_bytes: int
    cpu_s: int


class CheckCrashed(Exception):
    """The child ended without a verdict. `files_fault`: what it read brought it down."""

    def __init__(self, code: str, message: str, *, files_fault: bool) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.files_fault = files_fault


def _environment() -> dict[str, str]:
    """Only what Python needs; one BLAS thread, so that memory is the file's alone."""
    return {
        "PATH": os.defpath,
        "PYTHONPATH": str(PACKAGE_ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def outcome_from(message: dict[str, Any]) -> CheckOutcome:
    """A group as the child wrote it."""
    return CheckOutcome(
        group=str(message["group"]),
        status=str(message["status"]),
        findings=list(message["findings"]),
        figures=dict(message["figures"]),
        duration_ms=int(message["duration_ms"]),
    )


async def run_checks(
    folder: Path,
    description: ModelDescription,
    *,
    max_rank: int,
    max_bytes: int,
    bounds: Bounds,
) -> AsyncGenerator[CheckOutcome]:
    """The groups' outcomes as each is known. Raises CheckCrashed when the child gives none."""
    job = Job(str(folder), description, max_rank, max_bytes, bounds.memory_bytes, bounds.cpu_s)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "app.adapters.check_child",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=_environment(),
        cwd="/",
        limit=LINE_BYTES,
        start_new_session=True,
    )
    try:
        async with aclosing(_conversation(process, job, bounds.wall_s)) as messages:
            async for message in messages:
                if "crash" in message:
                    raise _reported(message)
                yield outcome_from(message)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _conversation(
    process: asyncio.subprocess.Process, job: Job, wall_s: float
) -> AsyncGenerator[dict[str, Any]]:
    """Sends the job and reads lines until {"end": true}; anything else is a crash."""
    assert process.stdin is not None
    assert process.stdout is not None
    deadline = asyncio.get_running_loop().time() + wall_s
    try:
        async with asyncio.timeout_at(deadline):
            process.stdin.write(msgspec.json.encode(asdict(job)))
            await process.stdin.drain()
            process.stdin.close()
    except (ConnectionResetError, BrokenPipeError):
        pass  # it died at once; its exit status says why
    except TimeoutError as error:
        raise _too_slow(wall_s) from error
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                line = await process.stdout.readline()
        except TimeoutError as error:
            raise _too_slow(wall_s) from error
        except ValueError as error:
            raise CheckCrashed(
                "check_crashed", "the check's report is too long", files_fault=True
            ) from error
        if not line:
            raise _died(await process.wait())
        message = json.loads(line)
        if message.get("end"):
            return
        yield message


def _too_slow(wall_s: float) -> CheckCrashed:
    return CheckCrashed(
        "check_timeout", f"a check took more than {wall_s:g} s and was stopped", files_fault=False
    )


def _reported(message: dict[str, Any]) -> CheckCrashed:
    """What the child could still say of its own end."""
    if message["crash"] == "MemoryError":
        return CheckCrashed(
            "resource_limit",
            "reading these files takes more memory than a check may use",
            files_fault=True,
        )
    return CheckCrashed(
        "check_crashed",
        f"a check stopped with {message['crash']}; this is a fault of the server's",
        files_fault=False,
    )


def _died(status: int) -> CheckCrashed:
    """What a child's exit status says: its CPU limit, a fault in parsing, or the machine."""
    if status == -signal.SIGXCPU:
        return CheckCrashed(
            "resource_limit",
            "reading these files takes more processor time than a check may use",
            files_fault=True,
        )
    if -status in FAULT_SIGNALS:
        return CheckCrashed(
            "check_crashed", "reading these files brings a check down", files_fault=True
        )
    return CheckCrashed(
        "check_crashed", f"a check ended with status {status} and no verdict", files_fault=False
    )
