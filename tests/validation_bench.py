"""What tests of uploads and validation share: a probed engine, a queue that records, uploads.

bench = make_bench(app)                     # the app's resources, with the fakes below
await post_upload(client, key, good_adapter(tiny_description()), name="a")
await bench.work()                          # what a worker does with the messages so far
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from fastapi import FastAPI

from app.adapters import base_models
from app.adapters.deps import open_resources
from app.adapters.resources import QueueUnavailable, Resources
from app.adapters.sweeps import VALIDATE_TASK
from app.adapters.tasks import validate_version
from app.keys.service import NewKey
from app.platform import Platform
from engine.adapters.config import rank_beyond
from engine.errors import EngineError, EngineUnavailable
from engine.types import (
    AdapterRef,
    GenerateRequest,
    ModelDescription,
    RequestOutput,
    RequestUsage,
    TokenLogprobs,
)
from tests.adapter_files import AdapterFiles, tiny_description
from tests.factories import bearer

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
BOUNDARY = "the-parts-of-this-test"


# --------------------------------------------------------------------------- the engine


@dataclass
class ProbedEngine:
    """Answers probes; with an adapter its probabilities are `shift` nats away.

    fail_with   raised (an EngineError) or sent as an error output (a code) when an adapter runs
    poison      with an adapter, every number is NaN
    repeats     with an adapter, the answer is one token over and over
    loading     how many times `forget` finds a load under way
    """

    description: ModelDescription = field(default_factory=tiny_description)
    away: bool = False
    shift: float = 0.2
    poison: bool = False
    repeats: bool = False
    fail_with: EngineError | str | None = None
    loading: int = 0
    requests: list[GenerateRequest] = field(default_factory=list)
    forgotten: list[AdapterRef] = field(default_factory=list)

    async def describe(self) -> ModelDescription:
        self._reachable()
        return self.description

    async def forget(self, ref: AdapterRef) -> bool:
        self._reachable()
        if self.loading:
            self.loading -= 1
            return False
        self.forgotten.append(ref)
        return True

    async def generate(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        self._reachable()
        self.requests.append(request)
        adapter = request.adapter is not None
        usage = RequestUsage(len(request.prompt), 0, 0, 0.0, 0.0, 1.0, 1.0)
        if adapter and isinstance(self.fail_with, EngineError):
            raise self.fail_with
        if adapter and self.fail_with is not None:
            yield RequestOutput(
                request.request_id,
                0,
                finish="error",
                usage=usage,
                error_code=str(self.fail_with),
                error_message="the engine says so",
            )
            return
        count = request.sampling.max_tokens
        tokens = [7] * count if adapter and self.repeats else list(range(1, count + 1))
        total_ms = 1.0 + count * (2.0 if adapter else 1.0)
        yield RequestOutput(
            request.request_id,
            0,
            token_ids=tokens,
            logprobs=[self._entry(token, adapter) for token in tokens],
            prompt_logprobs=self._prompt(request, adapter),
            finish="length",
            usage=replace(usage, completion_tokens=count, total_ms=total_ms),
        )

    def _prompt(self, request: GenerateRequest, adapter: bool) -> list[TokenLogprobs | None] | None:
        if request.prompt_logprobs is None:
            return None
        return [None, *(self._entry(token, adapter) for token in request.prompt[1:])]

    def _entry(self, token: int, adapter: bool) -> TokenLogprobs:
        if adapter and self.poison:
            return TokenLogprobs(token, float("nan"), [])
        likely = -0.5 - (self.shift if adapter else 0.0)
        return TokenLogprobs(token, likely, [(token, likely), (token + 1, -2.5)])

    def _reachable(self) -> None:
        if self.away:
            raise EngineUnavailable("the engine's process has ended")


# --------------------------------------------------------------------------- the bench


@dataclass
class RecordingQueue:
    """Holds the messages; `away` makes it a broker that cannot be reached."""

    messages: list[tuple[str, str]] = field(default_factory=list)
    away: bool = False

    async def send(self, task: str, *ids: str) -> None:
        if self.away:
            raise QueueUnavailable("ConnectionError")
        self.messages.append((task, *ids))  # type: ignore[arg-type]


def encode(_description: ModelDescription, text: str) -> Sequence[int]:
    return list(text.encode()[:24])


@dataclass
class Bench:
    resources: Resources
    queue: RecordingQueue
    engine: ProbedEngine

    async def work(self) -> list[str]:
        """Delivers every message once, as a worker would; what came of each."""
        messages, self.queue.messages = self.queue.messages, []
        return [
            await validate_version(self.resources, version_id)
            for task, version_id in messages
            if task == VALIDATE_TASK
        ]


def bench_resources(platform: Platform, **changes: Any) -> Bench:
    """Resources with the fakes, for a platform without an app."""
    queue, engine = RecordingQueue(), ProbedEngine()
    values: dict[str, Any] = {"queue": queue, "engines": [engine], "encode": encode}
    resources = replace(open_resources(platform), **{**values, **changes})
    return Bench(resources, queue, engine)


async def make_bench(app: FastAPI, **changes: Any) -> Bench:
    """The same as the app's own resources; its base model is known already."""
    platform: Platform = app.state.platform
    bench = bench_resources(platform, **changes)
    app.state.adapter_resources = bench.resources
    await base_models.remember(platform.db, bench.engine.description, platform.clock.now())
    return bench


# --------------------------------------------------------------------------- uploads


def earns_a_report(files: AdapterFiles, max_rank: int) -> bool:
    """Whether an upload gets as far as the checks: nothing of it is refused while it arrives."""
    whole = bool(files.config and files.weights and not files.extra)
    return whole and rank_beyond(files.config or b"", max_rank) is None


def part(name: str, data: bytes, *, filename: str | None = None) -> bytes:
    """One part of a multipart body."""
    suffix = "" if filename is None else f'; filename="{filename}"'
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{suffix}\r\n\r\n'
    return head.encode() + data + b"\r\n"


def body(*parts: bytes) -> bytes:
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


def upload_body(files: AdapterFiles, name: str) -> bytes:
    """The body of a whole upload; files that are None are left out."""
    parts = [part("name", name.encode())]
    if files.config is not None:
        parts.append(part(CONFIG, files.config, filename=CONFIG))
    if files.weights is not None:
        parts.append(part(WEIGHTS, files.weights, filename=WEIGHTS))
    parts += [part(other, data, filename=other) for other, data in files.extra.items()]
    return body(*parts)


CONTENT_TYPE = f"multipart/form-data; boundary={BOUNDARY}"


async def post_body(
    client: httpx.AsyncClient, key: NewKey, content: bytes, **headers: str
) -> httpx.Response:
    return await client.post(
        "/v1/adapters",
        content=content,
        headers={"content-type": CONTENT_TYPE, **bearer(key), **headers},
    )


async def post_upload(
    client: httpx.AsyncClient, key: NewKey, files: AdapterFiles, name: str, **headers: str
) -> httpx.Response:
    return await post_body(client, key, upload_body(files, name), **headers)
