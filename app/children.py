"""A child process that dies with its parent, and the pauses between its restarts."""

import asyncio
import ctypes
import os
import signal
from collections.abc import Callable, Mapping

from app.processes import ProcessCommand

_PR_SET_PDEATHSIG = 1
_CHUNK_BYTES = 64 * 1024
_LINE_BYTES = 8 * 1024
"""Longer log lines are cut into several."""

Say = Callable[[str, str], None]
"""Takes a process's name and one line of its output."""


class Backoff:
    """Pauses that double while a process keeps failing, and start over once it has held out."""

    FIRST_S = 0.5
    LONGEST_S = 30.0
    HELD_OUT_S = 60.0

    def __init__(self) -> None:
        self.failures = 0

    def after(self, ran_s: float) -> float:
        """The pause after a life of `ran_s` seconds."""
        self.failures = 1 if ran_s >= self.HELD_OUT_S else self.failures + 1
        doubled = self.FIRST_S * float(2 ** min(self.failures - 1, 10))
        return min(self.LONGEST_S, doubled)


class Child:
    """A running process in a session and process group of its own."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, say: Say) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self._reading = asyncio.create_task(self._read_lines(say), name=f"output of {name}")

    @classmethod
    async def start(
        cls, command: ProcessCommand, say: Say, environ: Mapping[str, str] | None = None
    ) -> "Child":
        """The kernel ends the child when this process ends, even by `kill -9`."""
        process = await asyncio.create_subprocess_exec(
            *command.argv,
            env=dict(os.environ if environ is None else environ) | {"PYTHONUNBUFFERED": "1"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_bind_to_parent(command.nice),
        )
        return cls(command.name, process, say)

    async def wait(self) -> int:
        """Its exit status, negative for a signal, once its output is read too."""
        status = await self._process.wait()
        self._signal_group(signal.SIGKILL)  # what it left behind in its group
        await self._reading
        return status

    def terminate(self) -> None:
        """Asks the process itself; it passes the word on to its own children."""
        if self._process.returncode is None:
            self._process.terminate()

    def kill(self) -> None:
        """Ends the process and all of its group."""
        self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return

    async def _read_lines(self, say: Say) -> None:
        assert self._process.stdout is not None
        held = b""
        while chunk := await self._process.stdout.read(_CHUNK_BYTES):
            *lines, held = (held + chunk).split(b"\n")
            for line in lines:
                say(self.name, line.decode(errors="replace"))
            while len(held) > _LINE_BYTES:
                say(self.name, held[:_LINE_BYTES].decode(errors="replace"))
                held = held[_LINE_BYTES:]
        if held:
            say(self.name, held.decode(errors="replace"))


def _bind_to_parent(nice: int) -> Callable[[], None]:
    """What the child does before it becomes its command. Linux; elsewhere without the bond."""
    parent = os.getpid()
    prctl = getattr(ctypes.CDLL(None), "prctl", None)

    def before_exec() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:  # it ended between fork and prctl
                os._exit(1)
        os.umask(0o077)
        if nice:
            os.nice(nice)

    return before_exec
