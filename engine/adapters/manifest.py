"""The front door of the adapter checks: what the worker, the CLI and the engine call.

    report = check_adapter_folder(Path("my-adapter"), description, max_rank=64)
    report.status, report.codes, report.groups      # container > config > coverage > numbers

The groups come one by one from `iterate_checks`, for callers that show them live. Torch-free.
"""

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.adapters.config import AdapterConfig, ConfigReport, check_config, lora_scale
from engine.adapters.findings import (
    CODES,
    GROUPS,
    CheckGroup,
    Finding,
    FindingList,
    Status,
    clip,
    clip_names,
    finding,
)
from engine.adapters.numbers import ModuleFigures, NumbersReport, measure_adapter
from engine.adapters.plan import AdapterPlan, PlannedPair, plan_adapter
from engine.adapters.safetensors_header import (
    SafetensorsHeader,
    TensorInfo,
    open_regular,
    read_header,
)
from engine.adapters.tensor_names import PREFIX
from engine.errors import AdapterCorrupt, AdapterRefused
from engine.types import ModelDescription

__all__ = [
    "CODES",
    "CONFIG_NAME",
    "GROUPS",
    "PREFIX",
    "WEIGHTS_NAME",
    "AdapterConfig",
    "AdapterPlan",
    "CheckGroup",
    "ConfigReport",
    "Finding",
    "ModuleFigures",
    "NumbersReport",
    "PlannedPair",
    "Report",
    "SafetensorsHeader",
    "TensorInfo",
    "check_adapter_folder",
    "check_config",
    "iterate_checks",
    "lora_scale",
    "measure_adapter",
    "plan_adapter",
    "read_header",
]

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
MAX_CONFIG_READ = 1024 * 1024
DEFAULT_MAX_BYTES = 2 * 1024**3


@dataclass(frozen=True, slots=True)
class Report:
    """All groups in order."""

    groups: tuple[CheckGroup, ...]

    @property
    def status(self) -> Status:
        """The worst of the groups: fail, warn or pass."""
        found = {group.status for group in self.groups}
        return "fail" if "fail" in found else "warn" if "warn" in found else "pass"

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(f for group in self.groups for f in group.findings)

    @property
    def codes(self) -> list[str]:
        """The codes that fail, or warn when none fails; in the order found, each once."""
        shown = "fail" if self.status == "fail" else "warn"
        return list(dict.fromkeys(f.code for f in self.findings if f.severity == shown))

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values, as `loramux adapters check --json` prints them."""
        return {"status": self.status, "groups": [asdict(group) for group in self.groups]}


def check_adapter_folder(
    folder: Path,
    description: ModelDescription,
    max_rank: int,
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Report:
    """The whole report on a folder that holds the two files. Never raises on what is in them."""
    return Report(tuple(iterate_checks(folder, description, max_rank, max_bytes=max_bytes)))


def iterate_checks(
    folder: Path,
    description: ModelDescription,
    max_rank: int,
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Iterator[CheckGroup]:
    """The four groups in order, each as soon as it is known; later ones may be `skipped`.

    The config is judged even when the weights' container is broken, so that one report shows both.
    """
    container, header, config_bytes = _check_container(folder, max_bytes)
    yield container
    config: AdapterConfig | None = None
    if config_bytes is None:
        yield CheckGroup("config", "skipped")
    else:
        judged = check_config(config_bytes, min(max_rank, description.max_rank))
        config = judged.config
        yield CheckGroup.of("config", judged.findings, _config_figures(judged))
    if header is None or config is None:
        yield CheckGroup("coverage", "skipped")
        yield CheckGroup("numbers", "skipped")
        return
    plan = plan_adapter(config, header, description)
    yield CheckGroup.of("coverage", plan.findings, coverage_figures(plan, description))
    if plan.failures:
        yield CheckGroup("numbers", "skipped")
        return
    try:
        numbers = measure_adapter(folder / WEIGHTS_NAME, plan, description)
    except (AdapterRefused, AdapterCorrupt) as error:
        changed = finding("file_changed", f"{error.message}: it changed while it was read")
        yield CheckGroup.of("numbers", [changed])
        return
    yield CheckGroup.of("numbers", numbers.findings, numbers.figures)


def coverage_figures(plan: AdapterPlan, description: ModelDescription) -> dict[str, Any]:
    """How many tensors were placed, where, and with which ranks."""
    modules = [description.modules[pair.module] for pair in plan.pairs]
    ranks = sorted({pair.rank for pair in plan.pairs})
    return {
        "tensors": plan.tensors,
        "placed": plan.placed,
        "ignored": plan.ignored,
        "coverage": plan.coverage,
        "modules": len(plan.pairs),
        "targets": sorted({module.target for module in modules}),
        "layers": len({module.layer for module in modules if module.layer >= 0}),
        "max_rank": ranks[-1] if ranks else 0,
        "ranks": ranks[:16],
        "parameters": sum((pair.a.nbytes // _item(pair.a)) + (pair.b.nbytes // _item(pair.b))
                          for pair in plan.pairs),
    }  # fmt: skip


def _item(tensor: TensorInfo) -> int:
    return 4 if tensor.dtype == "F32" else 2


def _config_figures(judged: ConfigReport) -> dict[str, Any]:
    config = judged.config
    if config is None:
        return {"verdict": judged.verdict}
    return {
        "verdict": judged.verdict,
        "rank": config.rank,
        "alpha": config.alpha,
        "rslora": config.rslora,
        "base_model": config.base_model_name,
    }


def _check_container(
    folder: Path, max_bytes: int
) -> tuple[CheckGroup, SafetensorsHeader | None, bytes | None]:
    found = FindingList()
    config = _read_config(folder / CONFIG_NAME, found)
    header = _read_weights(folder, max_bytes, found)
    extra = _extra_files(folder)
    if extra:
        found.add("extra_file_ignored", f"{clip_names(extra)} beside the two files is not used")
    figures: dict[str, Any] = {}
    if config is not None:
        figures["config_bytes"] = len(config)
    if header is not None:
        figures |= {
            "weights_bytes": header.file_bytes,
            "header_bytes": header.header_bytes,
            "tensors": len(header.tensors),
            "dtypes": sorted({tensor.dtype for tensor in header.tensors}),
        }
    return CheckGroup.of("container", found.done(), figures), header, config


def _read_config(path: Path, found: FindingList) -> bytes | None:
    try:
        descriptor = open_regular(path)
    except AdapterRefused as refusal:
        found.add(refusal.code, refusal.message, CONFIG_NAME)
        return None
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(MAX_CONFIG_READ + 1)
    if not data:
        found.add("empty_file", f"{CONFIG_NAME} is empty", CONFIG_NAME)
        return None
    return data


def _read_weights(folder: Path, max_bytes: int, found: FindingList) -> SafetensorsHeader | None:
    path = folder / WEIGHTS_NAME
    pickled = folder / "adapter_model.bin"
    if not path.exists() and pickled.exists():
        message = "adapter_model.bin is a pickle, which is never opened; save as safetensors"
        found.add("pickle_file", message, "adapter_model.bin")
        return None
    try:
        size = path.lstat().st_size if path.exists() else 0
        if size > max_bytes:
            found.add("file_too_large", f"{WEIGHTS_NAME} has {size} bytes; at most {max_bytes}",
                      WEIGHTS_NAME, size_bytes=size)  # fmt: skip
            return None
        return read_header(path)
    except AdapterRefused as refusal:
        found.add(refusal.code, refusal.message, refusal.field or WEIGHTS_NAME)
        return None


def _extra_files(folder: Path) -> list[str]:
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    return [clip(name) for name in names if name not in (CONFIG_NAME, WEIGHTS_NAME)]
