"""The peers' processes: each answers jobs, and stands still while another is measured."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from app.children import Child
from app.processes import ProcessCommand
from benchmarks.peers_parts.workload import Job

ROOT = Path(__file__).resolve().parents[2]
LOG_END = 2000
LAST_WORDS_S = 10.0


class PeerFailed(Exception):
    """It did not start, died, answered something else than asked, or took too long."""


@dataclass(frozen=True)
class Answer:
    tokens: list[list[int]]
    wall_s: float
    cpu_s: float  # of all its threads and processes


class Peer(ABC):
    """One contestant, in a session of its own that ends with this process."""

    def __init__(self, name: str, folder: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.environment = dict(environment)
        self.facts: dict[str, Any] = {}
        self._log = folder / f"{name}.log"
        self._child: Child | None = None

    async def start(self, timeout_s: float) -> None:
        """Returns when it can answer; raises PeerFailed."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._open()
        except TimeoutError:
            raise self._failed(f"was not up after {timeout_s:.0f} s") from None

    async def ask(self, job: Job, timeout_s: float) -> Answer:
        """Raises PeerFailed."""
        before = session_cpu_s(self.pid)
        try:
            async with asyncio.timeout(timeout_s):
                wall_s, tokens = await self._answer(job)
        except TimeoutError:
            raise self._failed(f"took longer than {timeout_s:.0f} s") from None
        lengths = {len(answer) for answer in tokens}
        if len(tokens) != len(job.prompts) or lengths != {job.output_tokens}:
            raise self._failed(f"gave {len(tokens)} answers of {sorted(lengths)} tokens")
        return Answer(tokens, wall_s, session_cpu_s(self.pid) - before)

    def pause(self) -> None:
        """It gets no processor until `resume`, however its idle threads wait."""
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self.pid, signal.SIGCONT)

    async def stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            await self._child.wait()

    @property
    def pid(self) -> int:
        """Of its first process and of its session; raises PeerFailed before `start`."""
        if self._child is None:
            raise PeerFailed(f"{self.name} was not started")
        return self._child.pid

    async def _spawn(self, *argv: str) -> None:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("LORAMUX_", "OMP_", "GOMP_", "KMP_"))
        }
        self._child = await Child.start(
            ProcessCommand(self.name, argv), self._note, inherited | self.environment
        )

    def _note(self, _: str, line: str) -> None:
        with self._log.open("a") as log:
            print(line, file=log)

    def _failed(self, what: str) -> PeerFailed:
        said = self._log.read_text(errors="replace") if self._log.exists() else ""
        return PeerFailed(f"{self.name} {what}\n{said[-LOG_END:]}")

    @abstractmethod
    async def _open(self) -> None: ...

    @abstractmethod
    async def _answer(self, job: Job) -> tuple[float, list[list[int]]]:
        """Seconds, and the new tokens of each prompt."""


class WorkerPeer(Peer):
    """A module under any Python that serves the `channel`."""

    def __init__(
        self,
        name: str,
        folder: Path,
        environment: Mapping[str, str],
        module: str,
        setup: Mapping[str, Any],
        python: Path = Path(sys.executable),
    ) -> None:
        super().__init__(name, folder, {**environment, "PYTHONPATH": str(ROOT)})
        self._argv = (str(python), "-m", module)
        self._setup = dict(setup)
        self._socket = folder / f"{name}.sock"

    async def _open(self) -> None:
        connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
        connected = asyncio.get_running_loop().create_future()
        server = await asyncio.start_unix_server(
            lambda reader, writer: connected.set_result((reader, writer)),
            self._socket,
            limit=1 << 24,
        )
        async with server:
            await self._spawn(*self._argv, str(self._socket))
            assert self._child is not None
            ended = asyncio.create_task(self._child.wait())
            await asyncio.wait({connected, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not connected.done():
                raise self._failed("ended before it was up")
            ended.cancel()
            self._reader, self._writer = connected.result()
        self.facts = await self._say(self._setup)

    async def _answer(self, job: Job) -> tuple[float, list[list[int]]]:
        answer = await self._say(vars(job))
        return answer["wall_s"], answer["tokens"]

    async def _say(self, message: Mapping[str, Any]) -> dict[str, Any]:
        self._writer.write(json.dumps(message).encode() + b"\n")
        line = await self._reader.readline()
        if not line:
            raise await self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def _ended(self) -> PeerFailed:
        """Once all that it said is in the log."""
        assert self._child is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._child.wait()
        return self._failed("ended")

    async def stop(self) -> None:
        with contextlib.suppress(AttributeError):
            self._writer.close()
        await super().stop()


class LlamaServer(Peer):
    """llama.cpp's server over HTTP; adapters by request. It batches what has the same adapter."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str], argv: list[str], adapters: list[Path]
    ) -> None:
        super().__init__("llama.cpp", folder, environment)
        self._argv = argv
        self._adapters = adapters
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port: int = probe.getsockname()[1]

    async def _open(self) -> None:
        loras = ["--lora", ",".join(map(str, self._adapters)), "--lora-init-without-apply"]
        address = ["--host", "127.0.0.1", "--port", str(self._port)]
        await self._spawn(*self._argv, *loras, *address)
        self._client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self._port}",
            timeout=None,
            limits=httpx.Limits(max_connections=None),
        )
        assert self._child is not None
        ended = asyncio.create_task(self._child.wait())
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if (await self._client.get("/health")).status_code == 200:
                    break
            if ended.done():
                raise self._failed("ended before it was up")
            await asyncio.sleep(0.2)
        ended.cancel()
        self.facts = {"version": (await self._client.get("/props")).json().get("build_info")}

    async def _answer(self, job: Job) -> tuple[float, list[list[int]]]:
        began = time.perf_counter()
        answers = await asyncio.gather(
            *(
                self._complete(prompt, adapter, job.output_tokens)
                for prompt, adapter in zip(job.prompts, job.adapters, strict=True)
            )
        )
        return time.perf_counter() - began, answers

    async def _complete(self, prompt: list[int], adapter: int | None, tokens: int) -> list[int]:
        body = {
            "prompt": prompt, "n_predict": tokens, "ignore_eos": True, "cache_prompt": False,
            "return_tokens": True, "samplers": ["top_k"], "top_k": 1,
            "lora": [{"id": adapter or 0, "scale": 0.0 if adapter is None else 1.0}],
        }  # fmt: skip
        try:
            response = await self._client.post("/completion", json=body)
        except httpx.HTTPError as error:
            raise self._failed(f"broke off: {error!r}") from error
        if response.status_code != 200:
            raise self._failed(f"answered {response.status_code}: {response.text[:300]}")
        answer: list[int] = response.json()["tokens"]
        return answer

    async def stop(self) -> None:
        with contextlib.suppress(AttributeError):
            await self._client.aclose()
        await super().stop()


def session_cpu_s(session: int) -> float:
    """User and system time so far of every process of a session, ended children included."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[3]) == session:
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")
