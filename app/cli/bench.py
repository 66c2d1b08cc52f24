"""`loramux bench`: closed-loop load on any OpenAI-compatible server, with latencies and goodput."""

import asyncio
import json
import statistics
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
import typer
from rich.progress import Progress

from app.cli.http import api_key, async_api, describe_error, require_server
from app.cli.output import JsonFlag, fail, print_json, print_rows, stderr
from app.clock import SystemClock

CLOCK = SystemClock()
WORDS = ("harbour", "lantern", "copper", "meadow", "signal", "orchard", "granite", "velvet")


@dataclass(frozen=True, slots=True)
class Sample:
    """One request: `error` is empty when it was answered whole."""

    model: str
    ttft_ms: float
    total_ms: float
    tokens: int
    error: str = ""

    @property
    def tpot_ms(self) -> float:
        return (self.total_ms - self.ttft_ms) / max(1, self.tokens - 1)


def bench(
    model: Annotated[list[str], typer.Option(help="May be repeated; requests take turns.")],
    url: Annotated[str | None, typer.Option("--url", help="The server; or LORAMUX_URL.")] = None,
    key: Annotated[str | None, typer.Option("--key", help="The key; or LORAMUX_API_KEY.")] = None,
    requests: Annotated[int, typer.Option(min=1, max=100_000)] = 32,
    concurrency: Annotated[int, typer.Option(min=1, max=512)] = 8,
    prompt_words: Annotated[int, typer.Option(min=1, max=4000)] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, max=4000)] = 64,
    ttft_ms: Annotated[float, typer.Option(help="Counts as good up to this TTFT.")] = 2000.0,
    tpot_ms: Annotated[float, typer.Option(help="... and this time per output token.")] = 200.0,
    as_json: JsonFlag = False,
) -> None:
    """Send REQUESTS streamed chats, CONCURRENCY at a time, and report what callers saw."""
    secret = api_key(key)
    require_server(url)
    started_ms = CLOCK.monotonic_ms()
    body = {
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    samples = asyncio.run(_run(url, secret, model, requests, concurrency, prompt_words, body))
    summary = summarise(samples, (CLOCK.monotonic_ms() - started_ms) / 1000, ttft_ms, tpot_ms)
    if as_json:
        print_json(summary)
        return
    rows = [{"measure": name.replace("_", " "), "value": value} for name, value in summary.items()]
    print_rows(rows, ("measure", "value"), as_json=False, empty="")
    errors = sorted({sample.error for sample in samples if sample.error})
    if errors:
        fail("; ".join(errors[:3]))


def summarise(
    samples: list[Sample], seconds: float, ttft_ms: float, tpot_ms: float
) -> dict[str, Any]:
    """Medians and 95th percentiles in ms over what was answered; refusals count against goodput."""
    answered = [sample for sample in samples if not sample.error]
    good = [s for s in answered if s.ttft_ms <= ttft_ms and s.tpot_ms <= tpot_ms]
    ttft = [sample.ttft_ms for sample in answered]
    tpot = [sample.tpot_ms for sample in answered]
    return {
        "requests": len(samples),
        "failed": len(samples) - len(answered),
        "seconds": round(seconds, 2),
        "output_tokens_per_s": round(sum(s.tokens for s in answered) / seconds, 1),
        "goodput_share": round(len(good) / len(samples), 3),
        "ttft_ms_p50": _percentile(ttft, 50),
        "ttft_ms_p95": _percentile(ttft, 95),
        "tpot_ms_p50": _percentile(tpot, 50),
        "tpot_ms_p95": _percentile(tpot, 95),
    }


def _percentile(values: list[float], percent: int) -> float | None:
    if not values:
        return None
    if len(values) == 1:
        return round(values[0], 1)
    return round(statistics.quantiles(values, n=100, method="inclusive")[percent - 1], 1)


async def _run(
    url: str | None,
    key: str,
    models: list[str],
    requests: int,
    concurrency: int,
    prompt_words: int,
    body: dict[str, Any],
) -> list[Sample]:
    gate = asyncio.Semaphore(concurrency)
    with Progress(console=stderr, transient=True) as progress:
        task = progress.add_task("requests", total=requests)
        async with async_api(url, key) as client:

            async def one(number: int) -> Sample:
                words = (WORDS[(number + i) % len(WORDS)] for i in range(prompt_words))
                prompt = f"Request {number}. Tell a story with these words: {' '.join(words)}"
                message = {"role": "user", "content": prompt}
                async with gate:
                    call = body | {"model": models[number % len(models)], "messages": [message]}
                    sample = await _measure(client, call)
                progress.advance(task)
                return sample

            return await asyncio.gather(*(one(number) for number in range(requests)))


async def _measure(client: httpx.AsyncClient, call: dict[str, Any]) -> Sample:
    started_ms = CLOCK.monotonic_ms()
    first_ms: float | None = None
    tokens = 0
    error = ""
    try:
        async with client.stream("POST", "/v1/chat/completions", json=call) as response:
            if not response.is_success:
                await response.aread()
                return Sample(call["model"], 0.0, 0.0, 0, describe_error(response))
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[len("data: ") :])
                if "error" in chunk:
                    error = chunk["error"]["message"]
                    continue
                if first_ms is None and any(c["delta"].get("content") for c in chunk["choices"]):
                    first_ms = CLOCK.monotonic_ms()
                if chunk.get("usage"):
                    tokens = chunk["usage"]["completion_tokens"]
    except httpx.HTTPError as problem:
        error = f"the connection failed ({type(problem).__name__})"
    ended_ms = CLOCK.monotonic_ms()
    ttft_ms = (first_ms or ended_ms) - started_ms
    return Sample(call["model"], ttft_ms, ended_ms - started_ms, tokens, error)
