"""loramux's engine behind the channel: the core in this process, as `python -m engine` builds it.

python -m benchmarks.peers_parts.loramux_worker SOCKET
"""

import itertools
from pathlib import Path
from typing import Any

from benchmarks.peers_parts.channel import Answer, serve
from engine.__main__ import load_core
from engine.adapters.store import open_store
from engine.config import EngineConfig
from engine.server import Core
from engine.types import AdapterRef, GenerateRequest, SamplingParams

SALT = "5a" * 16


def open_peer(setup: dict[str, Any]) -> tuple[Answer, dict[str, Any]]:
    folder = Path(setup["folder"])
    config = EngineConfig.from_args(
        [
            *("--base-model", setup["base"], "--data-dir", str(folder)),
            *("--store-url", f"file://{folder / 'store'}", "--threads", str(setup["threads"])),
            *("--prefix-caching", "false"),
            *setup["engine"],
        ]
    )
    store = open_store(config.store_url)
    refs = []
    for path in map(Path, setup["adapters"]):
        with store.stage() as staging:
            staging.write_config((path / "adapter_config.json").read_bytes())
            staging.write_weights((path / "adapter_model.safetensors").read_bytes())
            refs.append(staging.commit(SALT).ref)
    core, _ = load_core(config, lambda _: None)
    number = itertools.count()

    def answer(job: dict[str, Any]) -> list[list[int]]:
        return run(core, refs, job, f"job{next(number)}")

    return answer, {}


def run(core: Core, refs: list[AdapterRef], job: dict[str, Any], name: str) -> list[list[int]]:
    """From the first submit to the last token."""
    answers: dict[str, list[int]] = {}
    for index, (prompt, adapter) in enumerate(zip(job["prompts"], job["adapters"], strict=True)):
        request_id = f"{name}-{index}"
        answers[request_id] = []
        core.submit(
            GenerateRequest(
                request_id=request_id, tenant=f"t{adapter or 0}", prompt=prompt,
                sampling=SamplingParams(
                    max_tokens=job["output_tokens"], temperature=0.0, ignore_eos=True
                ),
                cache_salt=request_id,
                adapter=None if adapter is None else refs[adapter],
            )
        )  # fmt: skip
    running = len(answers)
    while running:
        for output in core.step():
            if output.error_code is not None:
                raise RuntimeError(f"{output.error_code}: {output.error_message}")
            answers[output.request_id] += output.token_ids
            running -= output.usage is not None
    return list(answers.values())


if __name__ == "__main__":
    serve(open_peer)
