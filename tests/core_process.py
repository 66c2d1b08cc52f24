"""A real engine process with the real core, on an executor that invents its tokens.

`python -m tests.core_process ADDRESS JOURNAL STEP_MS COUNTS` serves it. Everything but the tensors
is the engine's own: scheduling, cancellation, attribution, journal. COUNTS is a file to which each
step appends "request tokens": what a test holds the ledger against, whoever was killed.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from app.settings import packaged_base_model
from engine.clock import SystemClock
from engine.core import EngineCore
from engine.server import EngineServer, ServerOptions
from engine.text import TextCodec
from engine.types import AdapterRef, ModelDescription, RequestOutput, StepPlan, StepResult
from tests.adapter_files import tiny_description
from tests.fakes import FakeAdapter, FakeExecutor, FakeLoader, engine_config


def served_description() -> ModelDescription:
    codec = TextCodec.load(packaged_base_model())
    return replace(
        tiny_description(),
        tokenizer_digest=codec.tokenizer_digest,
        vocab_size=codec.vocab_size,
        context_length=1024,
    )


class SlowExecutor(FakeExecutor):
    """Takes real time for a step, and forgets it afterwards."""

    def execute(self, plan: StepPlan) -> StepResult:
        time.sleep(self._step_ms / 1000.0)
        result = super().execute(plan)
        self.plans.clear()
        return result


class AnyAdapter(dict[AdapterRef, FakeAdapter]):
    """A store that has every adapter."""

    def get(self, ref: AdapterRef, default: Any = None) -> FakeAdapter:
        return self.setdefault(ref, FakeAdapter())


class CountedCore(EngineCore):
    """Notes every token that the engine made, before anyone is told of it."""

    def __init__(self, *parts: Any, counts: IO[str]) -> None:
        super().__init__(*parts)
        self._counts = counts

    def step(self) -> list[RequestOutput]:
        outputs = super().step()
        for output in outputs:
            made = len(output.token_ids) + (output.stop_token is not None)
            self._counts.write(f"{output.request_id} {made}\n")
        self._counts.flush()
        return outputs


def main(argv: list[str]) -> None:
    address, journal, step_ms, counts = argv
    server = EngineServer(
        ServerOptions(
            listen=address,
            journal_path=Path(journal),
            beat_ms=100.0,
            client_timeout_ms=2000.0,
            drain_ms=1000.0,
        )
    )

    def load() -> tuple[CountedCore, ModelDescription]:
        clock = SystemClock()
        description = served_description()
        executor = SlowExecutor(4096, description=description, step_ms=float(step_ms))
        loader = FakeLoader(clock)  # type: ignore[arg-type]
        loader.adapters = AnyAdapter()
        parts = (engine_config(), executor, loader, clock)
        return CountedCore(*parts, counts=Path(counts).open("a")), description

    server.serve(load)


if __name__ == "__main__":
    main(sys.argv[1:])
