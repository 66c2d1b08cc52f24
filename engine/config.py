"""The engine's settings: one frozen record, read from the environment and the command line.

Every field is `--field-name VALUE` on the command line and `LORAMUX_ENGINE_FIELD_NAME` in the
environment; the command line wins. Sizes are bytes, times are milliseconds.
"""

import argparse
import os
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin, get_type_hints

ENV_PREFIX = "LORAMUX_ENGINE_"
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class EngineConfig:
    base_model: Annotated[Path, "GGUF file or Hugging Face folder of the base model"]
    data_dir: Annotated[Path, "folder of the engine's own files"] = Path("data")
    store_url: Annotated[str, "where adapters are stored"] = "file://data/adapters"
    listen: Annotated[str, "address: ipc:// or tcp://"] = "ipc://data/run/engine.sock"
    journal_path: Annotated[Path | None, "token journal; default: data_dir/engine.journal"] = None

    curve_dir: Annotated[Path | None, "folder of the CURVE keys (tcp only)"] = None
    beat_ms: Annotated[float, "time between two signs of life to every client"] = 500.0
    client_timeout_ms: Annotated[float, "silence after which a client's requests are cancelled"] = (
        10_000.0
    )
    drain_ms: Annotated[float, "time that running requests get after SIGTERM"] = 20_000.0
    outbox_messages: Annotated[int, "unread messages after which a client is dropped"] = 2_000
    registry_url: Annotated[
        str | None, "redis:// where the engine registers itself; give it in the environment"
    ] = None
    advertise: Annotated[str | None, "address that is registered; default: listen"] = None
    lease_ms: Annotated[float, "how long a registration outlives the last sign of it"] = 10_000.0
    tracing: Annotated[bool, "send OpenTelemetry spans, as OTEL_* says"] = False

    backend: Annotated[
        Literal["auto", "cpu", "cuda"], "what steps run on; auto: a CUDA device where one can"
    ] = "auto"
    arena_bytes: Annotated[int, "KV cache and resident adapters, together (cpu)"] = 1024 * MIB
    device_memory_share: Annotated[
        float, "of the device's memory, what the engine may use; the arena gets the rest (cuda)"
    ] = 0.9
    adapter_share: Annotated[float, "most of the arena that adapters may hold"] = 0.5
    host_cache_bytes: Annotated[int, "adapters kept in host memory"] = 512 * MIB
    max_slots: Annotated[int, "most adapters resident at once"] = 128
    max_rank: Annotated[int, "largest adapter rank"] = 256
    max_loads: Annotated[int, "adapters read from the store at once"] = 2
    copy_bytes_per_step: Annotated[int, "adapter bytes moved to the device in one step"] = 16 * MIB
    adapter_aging_ms: Annotated[
        float, "wait after which an adapter is given the place of a resident one"
    ] = 300.0
    quarantine_ms: Annotated[float, "how long a broken adapter is not tried again"] = 60_000.0
    missing_retry_ms: Annotated[float, "how long an unreadable adapter is not tried again"] = 2000.0

    max_batch_tokens: Annotated[int, "most tokens of one step"] = 512
    prefill_chunk: Annotated[int, "most prompt tokens of a step in which others decode"] = 256
    max_running: Annotated[int, "most sequences in progress"] = 64
    max_choices: Annotated[int, "most choices of one request"] = 8
    max_waiting: Annotated[int, "most requests that wait to start"] = 512
    max_waiting_per_tenant: Annotated[int, "the same, of one tenant"] = 128
    policy: Annotated[Literal["slo", "vtc", "fcfs"], "who runs next"] = "slo"
    queue_aging_ms: Annotated[
        float, "wait after which a request gets a share of its own of the admissions"
    ] = 10_000.0
    calibration_ms: Annotated[
        float, "longest time for priming the step-time model at a first start; 0: none"
    ] = 2000.0
    max_grammar_bytes: Annotated[int, "largest schema or grammar of a request"] = 128 << 10
    grammar_compile_ms: Annotated[float, "longest time that one may be compiled"] = 10_000.0
    prefix_caching: Annotated[bool, "keep the KV blocks of finished prompts"] = True

    form_cache_bytes: Annotated[
        int, "disk for repacked weights of quantized base models; 0: none is kept"
    ] = 32 << 30
    threads: Annotated[int, "CPU threads; 0: all cores"] = 0
    batch_invariant: Annotated[bool, "bitwise equal answers whatever else is in the batch"] = False
    linear_path: Annotated[Literal["auto", "native", "int4", "dense", "fp32"], "base linears"] = (
        "auto"
    )
    kv_dtype: Annotated[Literal["auto", "bf16", "fp32"], "element type of the KV cache"] = "auto"
    adapter_dtype: Annotated[Literal["auto", "bf16", "fp32"], "element type of adapters"] = "auto"

    def __post_init__(self) -> None:
        for name in ("arena_bytes", "host_cache_bytes", "max_slots", "max_rank", "max_loads",
                     "copy_bytes_per_step", "max_batch_tokens", "prefill_chunk", "max_running",
                     "max_choices", "max_waiting", "max_waiting_per_tenant"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.form_cache_bytes < 0:
            raise ValueError(f"form_cache_bytes must not be negative, not {self.form_cache_bytes}")
        if self.lease_ms < 100:
            raise ValueError(f"lease_ms must be at least 100, not {self.lease_ms}")
        if not 0.0 < self.adapter_share < 1.0:
            raise ValueError(f"adapter_share must lie between 0 and 1, not {self.adapter_share}")
        if not 0.0 < self.device_memory_share <= 1.0:
            raise ValueError(
                f"device_memory_share must lie between 0 and 1, not {self.device_memory_share}"
            )
        if self.max_batch_tokens < self.max_running:
            raise ValueError(
                f"max_batch_tokens ({self.max_batch_tokens}) must hold a decode of each of "
                f"max_running ({self.max_running}) sequences"
            )

    @classmethod
    def from_args(
        cls, argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ
    ) -> Self:
        """The settings from `argv` (default: the process's own) over `environ`.

        Raises SystemExit with a usage message on an unknown flag or an unreadable value.
        """
        parser = argparse.ArgumentParser(
            prog="python -m engine", description="One loramux serving engine."
        )
        hints = get_type_hints(cls, include_extras=True)
        for setting in fields(cls):
            env = environ.get(ENV_PREFIX + setting.name.upper())
            default = env if env is not None else setting.default
            _add_flag(parser, setting.name, hints[setting.name], default)
        given = vars(parser.parse_args(argv))
        try:
            return cls(**given)
        except ValueError as error:
            parser.error(str(error))


def _add_flag(parser: argparse.ArgumentParser, name: str, hint: Any, default: Any) -> None:
    annotation, doc = get_args(hint)
    kind = _plain(annotation)
    choices = get_args(kind) if get_origin(kind) is Literal else None
    if choices and default is not MISSING and default not in choices:  # argparse checks no default
        parser.error(
            f"{ENV_PREFIX}{name.upper()} is {default!r}: one of {', '.join(choices)} is due"
        )
    parser.add_argument(
        "--" + name.replace("_", "-"),
        type=str if choices else (_boolean if kind is bool else kind),
        choices=choices,
        required=default is MISSING,
        default=default,  # argparse converts one that is a string like a given value
        help=doc,
    )


def _plain(annotation: Any) -> Any:
    """`X` of an `X | None`."""
    if get_origin(annotation) in (Union, types.UnionType):
        return next(arg for arg in get_args(annotation) if arg is not type(None))
    return annotation


def _boolean(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
