"""`loramux bench`: an open-loop workload against any OpenAI-compatible server."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.progress import Progress, TaskID

from app.bench.live import Caller, LiveRun, discover_models, open_client, spread
from app.bench.outcomes import Outcome
from app.bench.plots import PlotsUnavailable, Run, draw_plots
from app.bench.report import summarise
from app.bench.tables import as_document, print_reports, write_json
from app.bench.workloads import (
    WORKLOADS,
    Budget,
    Lengths,
    Workload,
    generate,
)
from app.cli.http import require_server, server_url
from app.cli.output import JsonFlag, console, fail, print_json, stderr
from app.clock import SystemClock

INTERRUPTED = 130
"""The exit code after ctrl-C, as shells have it."""


def bench(
    workload: Annotated[str, typer.Option(help=" | ".join(WORKLOADS))] = "zipf",
    rate: Annotated[float, typer.Option(min=0.001, help="Requests per second.")] = 2.0,
    seconds: Annotated[float, typer.Option(min=0.1, max=86_400, help="Of arrivals.")] = 30.0,
    model: Annotated[
        list[str] | None, typer.Option(help="May be repeated. Default: all of /v1/models.")
    ] = None,
    url: Annotated[str | None, typer.Option("--url", help="The server; or LORAMUX_URL.")] = None,
    key: Annotated[
        list[str] | None,
        typer.Option("--key", help="One per tenant; or LORAMUX_API_KEY (several: with commas)."),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, max=100_000, help="Median.")] = 64,
    output_tokens: Annotated[int, typer.Option(min=1, max=100_000, help="Median.")] = 32,
    most_prompt: Annotated[int, typer.Option(min=1, help="Longest prompt, in tokens.")] = 1024,
    most_output: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    cv: Annotated[
        float | None, typer.Option(min=0.01, help="Of the gaps: 1 Poisson, 4 bursty.")
    ] = None,
    ttft_ms: Annotated[float | None, typer.Option(min=0.1, help="Good up to this TTFT.")] = 2000.0,
    tpot_ms: Annotated[
        float | None, typer.Option(min=0.1, help="Token k due at first token + k times this.")
    ] = 200.0,
    percentile: Annotated[
        float, typer.Option(min=0.01, max=0.999, help="Share that must be good.")
    ] = 0.95,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one answer.")] = 120.0,
    seed: Annotated[int, typer.Option(min=0)] = 1,
    output: Annotated[Path | None, typer.Option(help="Write the JSON here as well.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Write PNG plots into this folder.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Send a workload at its own pace (open loop) and report what callers saw.

    Every request is streamed; refusals count against goodput. Ctrl-C stops and reports.
    """
    if workload not in WORKLOADS:
        fail(f"{workload!r} is no workload; there are {', '.join(WORKLOADS)}")
    keys = _keys(key)
    if workload == "flood" and len(keys) < 2:
        fail("flood is one tenant beside others: give a --key of each, the flooding one first")
    require_server(url)
    shape = replace(
        WORKLOADS[workload],
        prompt=Lengths(prompt_tokens, 0.6, 1, max(prompt_tokens, most_prompt)),
        output=Lengths(output_tokens, 0.6, 1, max(output_tokens, most_output)),
        max_tokens=max(output_tokens, most_output),
        budgets=(Budget(ttft_ms, tpot_ms, percentile),),
        cv=cv or WORKLOADS[workload].cv,
    )
    outcomes, taken_s, stopped = asyncio.run(
        _run(_address(url), keys, model, shape, rate, seconds, timeout, seed)
    )
    report = summarise(outcomes, max(taken_s, 1e-3))
    label = f"{workload} @{rate:g}/s"
    facts = {"workload": workload, "rate": rate, "seconds": seconds, "seed": seed,
             "url": _address(url), "interrupted": stopped}  # fmt: skip
    if output is not None:
        write_json(output, {label: report}, **facts)
    if plots is not None:
        try:
            draw_plots(plots, {label: Run(outcomes, report)})
        except PlotsUnavailable as error:
            fail(str(error))
    if as_json:
        print_json(as_document({label: report}, **facts))
    else:
        print_reports(_show, {label: report})
    if stopped:
        raise typer.Exit(INTERRUPTED)
    if not report.answered:
        fail("no request was answered")


async def _run(
    url: str,
    keys: Sequence[str],
    models: Sequence[str] | None,
    shape: Workload,
    rate: float,
    seconds: float,
    timeout_s: float,
    seed: int,
) -> tuple[list[Outcome], float, bool]:
    """The outcomes, the seconds that it took, and whether it was stopped."""
    async with open_client(url, timeout_s) as client:
        callers = [Caller(key, models or await _models(client, key)) for key in keys]
        tenants, adapters = spread(callers)
        shape = replace(shape, tenants=tenants, adapters=adapters)
        requests = generate(shape, rate_per_s=rate, duration_ms=1000.0 * seconds, seed=seed)
        if not requests:
            fail(f"{rate:g} requests a second for {seconds:g} s are none; raise one of them")
        with Progress(console=stderr, transient=True) as progress:
            bar = progress.add_task("sending", total=len(requests))
            live = LiveRun(client, callers, shape, SystemClock(), timeout_s, seed)
            live.on_end = lambda _: _advance(progress, bar)
            with _stops_on_ctrl_c(live):
                taken_s = await live.run(requests)
        return live.outcomes, taken_s, live.stop.is_set()


async def _models(client: httpx.AsyncClient, key: str) -> list[str]:
    try:
        models = await discover_models(client, key)
    except httpx.HTTPStatusError as error:
        fail(f"/v1/models answered {error.response.status_code}; name models with --model")
    except (httpx.HTTPError, ValueError) as error:
        fail(f"the models could not be listed ({error}); name them with --model")
    if not models:
        fail("the key may call no model; name one with --model")
    return models


@contextlib.contextmanager
def _stops_on_ctrl_c(live: LiveRun) -> Iterator[None]:
    """The first ctrl-C stops the run; a second one the command."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        live.stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _keys(given: Sequence[str] | None) -> list[str]:
    keys = list(given or os.environ.get("LORAMUX_API_KEY", "").split(","))
    keys = [key.strip() for key in keys if key.strip()]
    if not keys:
        fail(
            "no API key: set LORAMUX_API_KEY (create one with `loramux keys create --tenant NAME`; "
            "for a server that asks for none, any word)"
        )
    return keys


def _address(url: str | None) -> str:
    """Servers are often named with the version in the path."""
    return server_url(url).removesuffix("/v1")


def _advance(progress: Progress, bar: TaskID) -> None:
    progress.advance(bar)


def _show(line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
