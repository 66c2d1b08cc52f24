"""`python -m app.adapters.check_child`: the checks of one adapter's files, in a bounded process.

Reads one Job (JSON) from standard input, writes one JSON line a group, then {"end": true}. The
limits are set before a byte of the adapter is opened.
"""

import ctypes
import errno
import resource
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from app.adapters.check_process import Job
from app.clock import SystemClock
from engine.adapters.manifest import CheckGroup, iterate_checks

PR_SET_PDEATHSIG = 1


def limit_self(memory_bytes: int, cpu_s: int) -> None:
    """Bounds this process for good: memory, processor time, no files written, no core dump."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for which, limit in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(which, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))


def write(message: dict[str, Any]) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def group_line(group: CheckGroup, duration_ms: int) -> dict[str, Any]:
    return {
        "group": group.name,
        "status": group.status,
        "findings": [asdict(entry) for entry in group.findings],
        "figures": group.figures,
        "duration_ms": duration_ms,
    }


def run(job: Job) -> None:
    """Writes a line for each group as soon as it is known."""
    clock = SystemClock()
    started_ms = clock.monotonic_ms()
    for group in iterate_checks(
        Path(job.folder), job.description, job.max_rank, max_bytes=job.max_bytes
    ):
        now_ms = clock.monotonic_ms()
        write(group_line(group, int(now_ms - started_ms)))
        started_ms = now_ms


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    limit_self(job.memory_bytes, job.cpu_s)
    try:
        run(job)
    except Exception as error:  # noqa: BLE001 - named to the parent, which decides
        full = isinstance(error, OSError) and error.errno == errno.ENOMEM  # a mapping's refusal
        write({"crash": "MemoryError" if full else type(error).__name__})
    else:
        write({"end": True})


if __name__ == "__main__":
    main()
