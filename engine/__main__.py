"""`python -m engine`: one serving engine as a process. SIGTERM drains it; a second one ends it."""

import logging
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from engine import log_lines
from engine.clock import SystemClock
from engine.config import EngineConfig
from engine.curve import load_engine_curve
from engine.errors import EngineError
from engine.server import Core, EngineServer, ServerOptions
from engine.tracing import open_tracing
from engine.types import ModelDescription

_log = logging.getLogger("engine")


def server_options(config: EngineConfig) -> ServerOptions:
    """What the process needs of the configuration. Raises CurveKeyError and TracingUnavailable."""
    return ServerOptions(
        listen=config.listen,
        journal_path=config.journal_path or config.data_dir / "engine.journal",
        curve=load_engine_curve(config.curve_dir) if config.curve_dir is not None else None,
        beat_ms=config.beat_ms,
        client_timeout_ms=config.client_timeout_ms,
        drain_ms=config.drain_ms,
        outbox_messages=config.outbox_messages,
        registry_url=config.registry_url,
        advertise=config.advertise,
        lease_ms=config.lease_ms,
        tracing=open_tracing("loramux-engine") if config.tracing else None,
    )


def load_core(
    config: EngineConfig, at_end: Callable[[Callable[[], None]], object]
) -> tuple[Core, ModelDescription]:
    """The model and everything above it; this is where torch is imported.

    `at_end` is given what is to be done once the engine has stopped.
    """
    yield_cores(config.threads)
    from engine.adapters.loader import StoreLoader
    from engine.adapters.store import open_store
    from engine.backends import open_backend
    from engine.calibration import calibrate
    from engine.core import EngineCore
    from engine.grammar import GrammarLimits, Grammars, Vocabulary
    from engine.step_time import StepTimeFile
    from engine.text import TextCodec

    def load_vocabulary() -> Vocabulary:
        return Vocabulary.of(TextCodec.load(config.base_model), description.eos_token_ids)

    clock = SystemClock()
    limits = GrammarLimits(config.max_grammar_bytes, config.grammar_compile_ms)
    grammars = Grammars(load_vocabulary, limits, clock)
    backend = open_backend(config, clock, grammars)
    description = backend.executor.description
    grammars.prepare()
    store = open_store(config.store_url)
    loader = StoreLoader(config, store, description, allocate=backend.allocate)
    device = f"{description.backend} {backend.device}"
    kept = StepTimeFile(config.data_dir / "step-times", description.base_digest, device)
    known = kept.load()
    core = EngineCore(config, backend.executor, loader, clock, known, grammars=grammars)
    if known is None and config.calibration_ms > 0:
        calibrate(core, clock, config.calibration_ms)
        kept.save(core.step_times)
    at_end(lambda: kept.save(core.step_times))
    return core, description


def yield_cores(threads: int) -> None:
    """Makes OpenMP's idle threads sleep where they have no core of their own. Before torch loads.

    By default they spin; as soon as another process (the api) wants a core, every parallel region
    then waits for a thread that is not scheduled, and steps take 10 to 50 times as long. With a
    core to spare (`--threads` below the number of cores) spinning is the faster way and stays.
    OMP_WAIT_POLICY and GOMP_SPINCOUNT in the environment win.
    """
    cores = os.cpu_count() or 1
    if (threads or cores) >= cores and "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def drain_on_sigterm(server: EngineServer) -> None:
    """SIGTERM and SIGINT drain; the second one of either ends the process as usual."""

    def drain(signum: int, frame: FrameType | None) -> None:
        signal.signal(signum, signal.SIG_DFL)
        server.stop()

    signal.signal(signal.SIGTERM, drain)
    signal.signal(signal.SIGINT, drain)


def main() -> int:
    """Exit status 0 after a drain, 2 when the engine could not start."""
    log_lines.configure()
    config = EngineConfig.from_args()
    try:
        server = EngineServer(server_options(config))
        drain_on_sigterm(server)
        endings: list[Callable[[], None]] = []
        server.serve(lambda: load_core(config, endings.append))
        for end in endings:
            end()
    except EngineError as error:
        _log.error("%s: %s", error.code, error.message)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
