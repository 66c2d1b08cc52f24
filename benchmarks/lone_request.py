"""What a token of a request alone costs on this CPU, from the engine's core and without sockets.

python -m benchmarks.lone_request --base-model FILE [--threads N] [--adapter FOLDER]

Told for a decode step: the time by the clock and the processor time of all threads, the least and
the median of `--steps`. On a machine that others use too, only the least and the second say much.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.arguments import at_least_one
from engine.__main__ import load_core
from engine.adapters.store import open_store
from engine.config import EngineConfig
from engine.server import Core
from engine.types import AdapterRef, GenerateRequest, SamplingParams

SALT = "5a" * 16
PROMPT_TOKENS = 128
ANSWER_TOKENS = 64


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig.from_args(
            [
                *("--base-model", options.base_model, "--data-dir", folder, "--backend", "cpu"),
                *("--store-url", f"file://{folder}/store", "--threads", str(options.threads)),
                *("--prefix-caching", "false", "--calibration-ms", "0"),
            ]
        )
        adapter = None if options.adapter is None else stored(config, options.adapter)
        core, _ = load_core(config, lambda _: None)
        clock_ms: list[float] = []
        processor_ms: list[float] = []
        for number in itertools.count():
            for clock_ns, processor_ns in decode_steps(core, f"request-{number}", adapter):
                clock_ms.append(clock_ns / 1e6)
                processor_ms.append(processor_ns / 1e6)
            if len(clock_ms) >= options.steps:
                break
    for name, times in (("clock", clock_ms), ("processor", processor_ms)):
        print(f"{name}: least {min(times):.2f} ms, median {statistics.median(times):.2f} ms")


def stored(config: EngineConfig, folder: Path) -> AdapterRef:
    """The adapter of a folder as PEFT saves it, put where the engine looks."""
    with open_store(config.store_url).stage() as staging:
        staging.write_config((folder / "adapter_config.json").read_bytes())
        staging.write_weights((folder / "adapter_model.safetensors").read_bytes())
        return staging.commit(SALT).ref


def decode_steps(core: Core, request_id: str, adapter: AdapterRef | None) -> list[tuple[int, int]]:
    """(clock, processor) nanoseconds of each step of a request after its first token."""
    core.submit(
        GenerateRequest(
            request_id=request_id, tenant="t", prompt=list(range(5, 5 + PROMPT_TOKENS)),
            sampling=SamplingParams(
                max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True
            ),
            cache_salt=request_id, adapter=adapter,
        )
    )  # fmt: skip
    steps = []
    while core.has_work:
        clock, processor = time.perf_counter_ns(), time.process_time_ns()
        outputs = core.step()
        took = time.perf_counter_ns() - clock, time.process_time_ns() - processor
        if any(output.error_code for output in outputs):
            raise RuntimeError(f"the request failed: {outputs}")
        if outputs:
            steps.append(took)
    return steps[1:]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-model", required=True)
    parser.add_argument("--adapter", type=Path, help="a folder as PEFT saves it")
    parser.add_argument("--threads", type=at_least_one, default=1)
    parser.add_argument("--steps", type=at_least_one, default=300)
    return parser.parse_args()


if __name__ == "__main__":
    main()
