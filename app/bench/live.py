"""Sends a workload to any OpenAI-compatible server: open loop, streamed, timed as a caller sees it.

Requests leave at their arrival times whatever the server does: a slow server meets as much traffic
as a fast one. The run is bounded: what is not over `timeout_s` after it was sent is given up.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from app.bench.outcomes import Outcome
from app.bench.workloads import TimedRequest, Workload
from app.clock import Clock

WORDS = (
    *("harbour", "lantern", "copper", "meadow", "signal", "orchard", "granite", "velvet"),
    *("thunder", "ribbon", "compass", "winter", "saddle", "candle", "marble", "river"),
)
_TEXT_PARTS = ("content", "reasoning_content", "reasoning")
"""Where tokens come: llama.cpp and vLLM send a model's thinking apart from its answer."""
MOST_IN_FLIGHT = 4096
"""Requests open at once, for the client's own sake; more are counted as `client_full`."""


@dataclass(frozen=True, slots=True)
class Caller:
    """One API key and the models that it sends requests for. Tenant t of a workload is caller t."""

    key: str
    models: Sequence[str]


def spread(workload_models: Sequence[Caller]) -> tuple[int, int]:
    """(tenants, adapters) that a workload needs so that every model of every caller has a number.

    Adapter a is model a div tenants of caller a mod tenants, as in `Workload.tenant_of`.
    """
    tenants = len(workload_models)
    return tenants, tenants * max(len(caller.models) for caller in workload_models)


def model_of(callers: Sequence[Caller], request: TimedRequest) -> tuple[Caller, str]:
    """Whose key and which model; what names no adapter goes to the first model."""
    caller = callers[request.tenant % len(callers)]
    if request.adapter < 0:
        return caller, caller.models[0]
    return caller, caller.models[(request.adapter // len(callers)) % len(caller.models)]


def open_client(url: str, timeout_s: float) -> httpx.AsyncClient:
    """As many connections as there are requests: a pool that queues would close the open loop."""
    return httpx.AsyncClient(
        base_url=url,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        timeout=httpx.Timeout(timeout_s),
    )


async def discover_models(client: httpx.AsyncClient, key: str) -> list[str]:
    """Everything that the key may call. Raises httpx.HTTPError, or ValueError on another answer."""
    response = await client.get("/v1/models", headers=_headers(key))
    response.raise_for_status()
    try:
        return [str(model["id"]) for model in response.json()["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError("/v1/models did not answer with a list of models") from error


@dataclass(slots=True)
class LiveRun:
    """A run in progress. `stop.set()` ends it: nothing more is sent, what is open is given up."""

    client: httpx.AsyncClient
    callers: Sequence[Caller]
    workload: Workload
    clock: Clock
    timeout_s: float = 120.0
    seed: int = 0
    on_end: Callable[[Outcome], object] = lambda _: None
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    outcomes: list[Outcome] = field(default_factory=list)
    _started_ms: float = 0.0
    _open: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self, requests: Sequence[TimedRequest]) -> float:
        """Sends everything and waits for its end; the seconds that it took."""
        self._started_ms = self.clock.monotonic_ms()
        for index, request in enumerate(requests):
            if not await self._wait_until(request.at_ms):
                break
            self._send(index, request)
        if self._open:
            stopped = asyncio.create_task(self.stop.wait())
            everything = asyncio.gather(*self._open, return_exceptions=True)
            either: set[asyncio.Future[Any]] = {stopped, everything}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            for task in self._open:
                task.cancel()
            await everything
        return self._now_ms() / 1000.0

    async def _wait_until(self, at_ms: float) -> bool:
        """False once the run is to stop."""
        delay_s = (at_ms - self._now_ms()) / 1000.0
        if delay_s > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.stop.wait(), delay_s)
        else:
            await asyncio.sleep(0)
        return not self.stop.is_set()

    def _send(self, index: int, request: TimedRequest) -> None:
        caller, model = model_of(self.callers, request)
        outcome = Outcome(
            tenant=f"t{request.tenant:03}",
            adapter=model,
            sent_ms=self._now_ms(),
            asked_tokens=request.prompt_tokens + request.output_tokens,
            budget=request.budget,
        )
        self.outcomes.append(outcome)
        if len(self._open) >= MOST_IN_FLIGHT:
            self._over(outcome, "client_full")
            return
        body = chat(model, prompt_text(self.seed, index, request), request.output_tokens)
        task = asyncio.create_task(self._call(caller.key, body, outcome))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _call(self, key: str, body: dict[str, Any], outcome: Outcome) -> None:
        outcome.sent_ms = self._now_ms()
        refused = "interrupted"
        try:
            async with asyncio.timeout(self.timeout_s):
                refused = await self._stream(key, body, outcome)
        except TimeoutError:
            refused = "timeout"
        except httpx.TimeoutException:
            refused = "timeout"
        except httpx.HTTPError:
            refused = "connection"
        finally:
            self._over(outcome, refused)

    async def _stream(self, key: str, body: dict[str, Any], outcome: Outcome) -> str:
        """The code of what ended it without a whole answer, or ""."""
        tokens = 0
        finished = False
        async with self.client.stream(
            "POST", "/v1/chat/completions", json=body, headers=_headers(key)
        ) as response:
            if not response.is_success:
                await response.aread()
                return refusal_code(response)
            async for chunk in _events(response):
                if "error" in chunk:
                    return str((chunk["error"] or {}).get("code") or "error_frame")
                for choice in chunk.get("choices") or ():
                    delta = choice.get("delta") or {}
                    if any(delta.get(part) for part in _TEXT_PARTS):
                        outcome.take(self._now_ms())
                    finished = finished or choice.get("finish_reason") is not None
                tokens = (chunk.get("usage") or {}).get("completion_tokens") or tokens
        outcome.count(tokens)
        return "" if finished else "truncated"

    def _over(self, outcome: Outcome, refused: str) -> None:
        outcome.refused, outcome.done = refused, True
        self.on_end(outcome)

    def _now_ms(self) -> float:
        return self.clock.monotonic_ms() - self._started_ms


def chat(model: str, prompt: str, max_tokens: int) -> dict[str, Any]:
    """The body of one request; nothing in it that a peer would not know."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def prompt_text(seed: int, index: int, request: TimedRequest) -> str:
    """About as many tokens as asked for; no two prompts begin alike."""
    words = np.random.default_rng((seed, index)).choice(WORDS, size=max(1, request.prompt_tokens))
    return f"{index}. " + " ".join(words.tolist())


def refusal_code(response: httpx.Response) -> str:
    """The server's own code, or its status."""
    try:
        code = response.json()["error"]["code"]
    except (ValueError, KeyError, TypeError):
        code = None
    return str(code) if code else f"http_{response.status_code}"


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON of every server-sent event up to [DONE]; other lines are passed over."""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[len("data:") :].strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        yield event if isinstance(event, dict) else {"error": {"code": "unreadable_event"}}


def _headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
