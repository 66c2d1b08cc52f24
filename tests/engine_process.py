"""A real engine process around a core that invents its tokens: for tests of what is between.

`python -m tests.engine_process ADDRESS JOURNAL STEP_MS OUTBOX_MESSAGES [CURVE_DIR]` serves it.
Each step brings every running request one token, its prompt's first token id plus the position.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from engine.__main__ import drain_on_sigterm
from engine.curve import load_engine_curve
from engine.errors import RequestRefused
from engine.server import EngineServer, ServerOptions
from engine.tracing import open_tracing
from engine.types import (
    AdapterRef,
    EngineStatus,
    GenerateRequest,
    ModelDescription,
    RequestOutput,
    RequestUsage,
    SamplingParams,
)

REPOSITORY = Path(__file__).parents[1]
HANG_TOKEN = 666
"""A prompt that begins with it makes the step loop hang."""
CRASH_TOKEN = 667
"""A prompt that begins with it makes the step loop raise."""


def describe() -> ModelDescription:
    return ModelDescription(
        name="invented",
        architecture="llama",
        base_digest="b" * 64,
        tokenizer_digest="t" * 64,
        modules=(),
        layers=1,
        hidden_size=8,
        vocab_size=1000,
        context_length=1024,
        max_rank=8,
        eos_token_ids=(2,),
        kv_block_bytes=1024,
        adapter_dtype="fp32",
        backend="invented",
    )


def make_request(request_id: str, max_tokens: int = 8, first_token: int = 10) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        tenant="ten_1",
        prompt=[first_token, 1, 2],
        sampling=SamplingParams(max_tokens=max_tokens),
        cache_salt="salt",
    )


@dataclass
class InventedCore:
    """Satisfies engine.server.Core."""

    step_ms: float = 0.0
    steps: int = 0
    running: dict[str, tuple[GenerateRequest, int]] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    cancelled_at: dict[str, int] = field(default_factory=dict)
    forgotten: list[AdapterRef] = field(default_factory=list)

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def submit(self, request: GenerateRequest) -> None:
        if not request.prompt:
            raise RequestRefused("the prompt is empty", code="prompt_empty", field="prompt")
        self.running[request.request_id] = (request, 0)

    def cancel(self, request_id: str, choice: int | None = None) -> None:
        """Its requests have one choice, number 0."""
        if request_id in self.running and not choice:
            self.cancelled.add(request_id)
            self.cancelled_at[request_id] = self.steps

    def forget(self, ref: AdapterRef) -> bool:
        self.forgotten.append(ref)
        return True

    def drain(self) -> None:
        pass

    def step(self) -> list[RequestOutput]:
        if self.step_ms:
            time.sleep(self.step_ms / 1000)
        self.steps += 1
        outputs = [self._advance(*entry) for entry in list(self.running.values())]
        self.cancelled.clear()
        return outputs

    def _advance(self, request: GenerateRequest, done: int) -> RequestOutput:
        if request.prompt[0] == HANG_TOKEN:
            time.sleep(3600)
        if request.prompt[0] == CRASH_TOKEN:
            raise ZeroDivisionError("a fault of the engine's own")
        cancelled = request.request_id in self.cancelled
        made = done if cancelled else done + 1
        last = cancelled or made == request.sampling.max_tokens
        if last:
            del self.running[request.request_id]
        else:
            self.running[request.request_id] = (request, made)
        return RequestOutput(
            request.request_id,
            sequence=done,
            token_ids=[] if cancelled else [request.prompt[0] + done],
            finish=("cancelled" if cancelled else "length") if last else None,
            usage=RequestUsage(len(request.prompt), 0, made, 0.0, 0.0, 1.0, 1.0) if last else None,
        )

    def status(self) -> EngineStatus:
        return EngineStatus(
            engine_id="",
            base_digest="b" * 64,
            uptime_ms=1.0,
            running=len(self.running),
            waiting=0,
            waiting_by_tenant={},
            steps=self.steps,
            step_ms_p50=1.0,
            kv_blocks_used=0,
            kv_blocks_cached=0,
            extents_total=1,
            extent_bytes=1024,
            device_adapter_bytes=0,
            host_adapter_bytes=0,
            host_budget_bytes=0,
            adapters=[],
            prompt_tokens_total=0,
            completion_tokens_total=0,
            preemptions_total=0,
            draining=False,
        )


def free_tcp_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


class EngineProcess:
    """The process, as a test handles it."""

    def __init__(
        self,
        folder: Path,
        step_ms: float = 5.0,
        curve_dir: Path | None = None,
        outbox_messages: int = 2000,
    ) -> None:
        folder.chmod(0o700)
        self.folder = folder
        self.address = f"ipc://{folder}/e.sock"
        self.step_ms = step_ms
        self.curve_dir = curve_dir
        self.outbox_messages = outbox_messages
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> "EngineProcess":
        command = [sys.executable, "-m", "tests.engine_process", self.address]
        command += [str(self.folder / "journal"), str(self.step_ms), str(self.outbox_messages)]
        if self.curve_dir is not None:
            command.append(str(self.curve_dir))
        self.process = subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True)
        return self

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """As `kill -9` does."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    async def exit_status(self) -> int:
        assert self.process is not None
        return await asyncio.to_thread(self.process.wait, 30)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGCONT)
            self.kill()

    def cpu_seconds(self) -> float:
        """User and system time that the process has used so far."""
        assert self.process is not None
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(argv: list[str]) -> None:
    options = ServerOptions(
        listen=argv[0],
        journal_path=Path(argv[1]),
        curve=load_engine_curve(Path(argv[4])) if len(argv) > 4 else None,
        beat_ms=50.0,
        client_timeout_ms=1500.0,
        drain_ms=5_000.0,
        outbox_messages=int(argv[3]),
        registry_url=os.environ.get("LORAMUX_ENGINE_REGISTRY_URL"),
        tracing=open_tracing("loramux-engine")
        if "OTEL_EXPORTER_OTLP_ENDPOINT" in os.environ
        else None,
    )
    server = EngineServer(options)
    drain_on_sigterm(server)
    core = InventedCore(step_ms=float(argv[2]))
    server.serve(lambda: (core, describe()))


if __name__ == "__main__":
    main(sys.argv[1:])
