"""What the gateway itself costs, beside LiteLLM's proxy, over one stub generator.

    python -m benchmarks.gateway [--litellm-python VENV/bin/python] [--postgres URL] [--json FILE]

    python3 -m venv /tmp/litellm && /tmp/litellm/bin/pip install 'litellm[proxy]==1.100.0'

makes the throw-away environment; without it loramux alone is measured. Each proxy is one process
on a core of its own; the load comes from this process on another core, which the stub shares
where there are only two. The real api runs unmodified: key, limits (by minute, concurrent, by
month) and ledger are on, and a temporary data folder is its own. The stub gives each running
request a token a step, as fast as it can, to both proxies alike.

Printed: what a proxy adds to the stub's own answer over HTTP (one caller, short whole answers; also
of a bare gateway with loramux's server, tokenizer and engine client alone, which is its floor),
requests/s (50 callers, the same answers), streamed tokens/s (50 streams at a time), processor time
of each, and the memory before and after many requests. Rounds alternate between the proxies, and
the medians are given. Tokenizing is part of the first two and also timed alone. Takes under four
minutes.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import uvloop

from app.settings import packaged_base_model
from benchmarks.arguments import at_least_one
from benchmarks.gateway_parts import processes
from benchmarks.gateway_parts.load import (
    BadAnswer,
    Sample,
    Target,
    load,
    streamed_text,
    whole_text,
)
from benchmarks.gateway_parts.processes import Proxy
from benchmarks.gateway_parts.stub import NAME, answer_text
from engine.text import TextCodec

PROMPT = (
    "What should I do on a rainy Sunday afternoon in a town by the sea? Answer briefly, please."
)
SHORT, LONG = 16, 200
CALLERS = 50
PHASE_S = {"latency": 2.0, "requests": 5.0, "stream": 4.0}
WARM_UP = 2000
MEMORY_S = 75.0
WHOLE_RUN_S = 235.0


@dataclass(frozen=True)
class Figures:
    """One round of one proxy."""

    p50_ms: float
    p99_ms: float
    requests_s: float
    request_cpu_ms: float
    tokens_s: float
    token_cpu_us: float
    load_share: float  # of its core, by the load generator, while requests were counted
    stream_load_share: float


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def check(target: Target, codec: TextCodec) -> float:
    """Both kinds of answer say what the stub said; the stream's frames for each token.

    Raises BadAnswer.
    """
    connection = await target.connect()
    whole = await connection.ask(target.request(PROMPT, SHORT, stream=False))
    streamed = await connection.ask(target.request(PROMPT, LONG, stream=True))
    connection.close()
    text, frames = streamed_text(streamed)
    if whole_text(whole) != answer_text(codec, SHORT) or text != answer_text(codec, LONG):
        raise BadAnswer(f"{target.name} answered {whole_text(whole)!r} and {text!r}")
    return frames / LONG


async def measure(proxy: Proxy) -> Figures:
    """One round."""
    target = proxy.target
    short = target.request(PROMPT, SHORT, stream=False)
    stream = target.request(PROMPT, LONG, stream=True)
    alone = await load(target, short, callers=1, seconds=PHASE_S["latency"])
    cpu = proxy.cpu_s()
    many = await load(target, short, callers=CALLERS, seconds=PHASE_S["requests"])
    many_cpu, cpu = proxy.cpu_s() - cpu, proxy.cpu_s()
    streams = await load(target, stream, callers=CALLERS, seconds=PHASE_S["stream"])
    streams_cpu = proxy.cpu_s() - cpu
    answered, tokens = len(many.took_ms), len(streams.took_ms) * LONG
    return Figures(
        p50_ms=percentile(alone.took_ms, 0.5),
        p99_ms=percentile(alone.took_ms, 0.99),
        requests_s=answered / many.seconds,
        request_cpu_ms=many_cpu / answered * 1000,
        tokens_s=tokens / streams.seconds,
        token_cpu_us=streams_cpu / tokens * 1e6,
        load_share=many.own_cpu_s / many.seconds,
        stream_load_share=streams.own_cpu_s / streams.seconds,
    )


async def memory(proxy: Proxy, requests: int) -> dict[str, float]:
    """Resident MB after the warm-up and after `requests` more, the last tenth streamed."""
    target = proxy.target
    short = target.request(PROMPT, SHORT, stream=False)
    stream = target.request(PROMPT, SHORT, stream=True)
    for request in (short, stream):
        await load(target, request, callers=CALLERS, seconds=MEMORY_S, requests=WARM_UP // 2)
    before = proxy.rss_mb()
    whole = await load(
        target, short, callers=CALLERS, seconds=MEMORY_S, requests=requests - requests // 10
    )
    streamed = await load(
        target, stream, callers=CALLERS, seconds=MEMORY_S / 5, requests=requests // 10
    )
    made = len(whole.took_ms) + len(streamed.took_ms)
    return {"requests": made, "before_mb": before, "after_mb": proxy.rss_mb()}


def tokenizing_us(codec: TextCodec, rounds: int = 300) -> float:
    """Rendering and tokenizing the prompt: processor time of a call, in this process."""
    message = [{"role": "user", "content": PROMPT}]
    codec.encode_chat(message)
    began = time.process_time()
    for _ in range(rounds):
        codec.encode_chat(message)
    return (time.process_time() - began) / rounds * 1e6


def median(rounds: list[Figures]) -> Figures:
    return Figures(
        **{
            name: statistics.median(getattr(figures, name) for figures in rounds)
            for name in Figures.__dataclass_fields__
        }
    )


def report(
    direct: Sample, bare: Sample, by_name: dict[str, Figures]
) -> dict[str, dict[str, float]]:
    """The printed table, as data too."""
    base50, base99 = percentile(direct.took_ms, 0.5), percentile(direct.took_ms, 0.99)
    rows = {
        name: {
            "added_p50_ms": figures.p50_ms - base50,
            "added_p99_ms": figures.p99_ms - base99,
            **asdict(figures),
        }
        for name, figures in by_name.items()
    }
    columns = {
        "added_p50_ms": "added p50 ms",
        "added_p99_ms": "added p99 ms",
        "requests_s": "requests/s",
        "request_cpu_ms": "CPU ms a request",
        "tokens_s": "streamed tokens/s",
        "token_cpu_us": "CPU us a token",
        "load_share": "load generator's share of its core, requests",
        "stream_load_share": "the same, streams",
    }
    print(f"\nthe stub alone over HTTP: p50 {base50:.2f} ms, p99 {base99:.2f} ms")
    bare50, bare99 = percentile(bare.took_ms, 0.5), percentile(bare.took_ms, 0.99)
    print(f"a bare gateway adds: p50 {bare50 - base50:.2f} ms, p99 {bare99 - base99:.2f} ms")
    print(f"{'':46}" + "".join(f"{name:>12}" for name in rows))
    for column, title in columns.items():
        print(f"{title:46}" + "".join(f"{row[column]:12.2f}" for row in rows.values()))
    if "litellm" in rows:
        ours, theirs = rows["loramux"], rows["litellm"]
        print(
            f"loramux / litellm: added p50 {ours['added_p50_ms'] / theirs['added_p50_ms']:.3f} "
            f"(wanted <= 0.25), requests/s {ours['requests_s'] / theirs['requests_s']:.1f} "
            f"(>= 5), streamed tokens/s {ours['tokens_s'] / theirs['tokens_s']:.1f} (>= 10)"
        )
    return rows


async def run(wanted: argparse.Namespace) -> None:
    cores = sorted(os.sched_getaffinity(0))
    proxy_core, load_core, stub_core = cores[0], cores[1 % len(cores)], cores[2 % len(cores)]
    if len(cores) < 3:
        stub_core = load_core
    codec = TextCodec.load(packaged_base_model())
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loramux-gw-")))
        address, port = await stack.enter_async_context(processes.stub(folder, stub_core))
        direct = Target("stub", port, NAME)
        short = direct.request(PROMPT, SHORT, stream=False)
        await processes.answers(direct, short, folder / "stub.log")
        bare = await stack.enter_async_context(processes.bare(folder, address, proxy_core))
        proxies = [
            await stack.enter_async_context(
                processes.loramux(folder, codec, address, proxy_core, wanted.postgres)
            )
        ]
        if wanted.litellm_python is not None:
            proxies.append(
                await stack.enter_async_context(
                    processes.litellm(wanted.litellm_python, folder, port, proxy_core)
                )
            )
        else:
            print("LiteLLM is not measured: --litellm-python names no environment of it")
        os.sched_setaffinity(0, {load_core})
        frames = {}
        bare_short = bare.target.request(PROMPT, SHORT, stream=False)
        await processes.answers(bare.target, bare_short, folder / "bare.log")
        await load(bare.target, bare_short, callers=8, seconds=1.0)
        for proxy in proxies:
            target = proxy.target
            request = target.request(PROMPT, SHORT, stream=False)
            await processes.answers(target, request, folder / f"{target.name}.log")
            frames[target.name] = await check(target, codec)
            await load(target, request, callers=8, seconds=1.0)
        alone, floor = Sample(), Sample()
        rounds: dict[str, list[Figures]] = {proxy.target.name: [] for proxy in proxies}
        for _ in range(wanted.rounds):
            alone.took_ms += (await load(direct, short, callers=1, seconds=1.0)).took_ms
            floor.took_ms += (await load(bare.target, bare_short, callers=1, seconds=1.0)).took_ms
            for proxy in proxies:
                rounds[proxy.target.name].append(await measure(proxy))
        rows = report(alone, floor, {name: median(figures) for name, figures in rounds.items()})
        tokenizing = tokenizing_us(codec)
        print(f"tokenizing the prompt: {tokenizing:.0f} us (part of loramux's figures)")
        print("frames a streamed token:", frames)
        held = await memory(proxies[0], wanted.requests) if wanted.requests else {}
        print("loramux's memory:", held)
        everything = {
            "cores": len(cores),
            "load_average": os.getloadavg(),
            "bare_p50_ms": percentile(floor.took_ms, 0.5),
            "figures": rows,
            "rounds": {name: list(map(asdict, figures)) for name, figures in rounds.items()},
            "tokenizing_us": tokenizing,
            "frames_a_token": frames,
            "memory": held,
        }
        text = msgspec.json.format(msgspec.json.encode(everything)).decode()
        print(text)
        if wanted.json is not None:
            wanted.json.write_text(text)


async def bounded(wanted: argparse.Namespace) -> None:
    async with asyncio.timeout(WHOLE_RUN_S):
        await run(wanted)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--litellm-python", type=Path, help="the python of LiteLLM's environment")
    options.add_argument("--postgres", help="postgresql://user@host/name, instead of SQLite")
    options.add_argument("--rounds", type=at_least_one, default=3)
    options.add_argument("--requests", type=int, default=20_000, help="for the memory; 0: none")
    options.add_argument("--json", type=Path, help="also write the figures to this file")
    uvloop.run(bounded(options.parse_args()))


if __name__ == "__main__":
    main()
