"""What one hostile file may cost: the check's process is measured by the kernel, kind by kind."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import pytest

from app.adapters.check_process import PACKAGE_ROOT, Job
from tests.adapter_files import (
    HOSTILE,
    AdapterFiles,
    config_json,
    good_adapter,
    lora_tensors,
    pack,
    tiny_description,
)

BASE = tiny_description()
CPU_S = 5.0
RSS_BYTES = 256 << 20
MIB = 1 << 20


@dataclass(frozen=True)
class Cost:
    """What a check's process used, and what it said."""

    cpu_s: float
    rss_bytes: int
    status: int
    codes: set[str]


LAUNCHER = """
import json, os, sys
command = [sys.executable, "-m", "app.adapters.check_child"]
for name in sys.argv[1:]:
    job = os.open(name, os.O_RDONLY)
    at_once = [(os.POSIX_SPAWN_DUP2, job, 0), (os.POSIX_SPAWN_CLOSE, job)]
    child = os.posix_spawn(sys.executable, command, os.environ, file_actions=at_once)
    _, status, used = os.wait4(child, 0)
    os.close(job)
    cost = [status, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024]
    print(json.dumps(cost), flush=True)
"""
"""A process starts with the peak of the one that made it: this one is small, the tests' is not."""


def measure(folders: list[Path]) -> list[Cost]:
    """Runs the checks as a worker does; the figures are the kernel's, of each process alone."""
    jobs = [folder.with_name(f"{folder.name}.job") for folder in folders]
    for folder, job in zip(folders, jobs, strict=True):
        told = Job(str(folder), BASE, 64, 512 * MIB, 4096 * MIB, 120)
        job.write_bytes(msgspec.json.encode(asdict(told)))
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER, *jobs],
        stdout=subprocess.PIPE,
        env={"PATH": os.defpath, "PYTHONPATH": str(PACKAGE_ROOT), "OPENBLAS_NUM_THREADS": "1"},
        check=True,
    )
    costs: list[Cost] = []
    codes: set[str] = set()
    for line in map(json.loads, done.stdout.splitlines()):
        if isinstance(line, list):
            status, cpu_s, rss_bytes = line
            costs.append(Cost(cpu_s, rss_bytes, status, codes))
            codes = set()
        else:
            found = line.get("findings", ())
            codes |= {str(each["code"]) for each in found if each["severity"] == "fail"}
    return costs


def sparse(folder: Path, header: dict[str, object], nbytes: int) -> None:
    """A good config beside weights of that size which take no room on the disk."""
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes(config_json())
    text = json.dumps(header).encode()
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + nbytes)


def _half_a_gigabyte_of_one_tensor(folder: Path) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    size = 500 * MIB
    entry = {"dtype": "F32", "shape": [4, size // 16], "data_offsets": [0, size]}
    sparse(folder, {name: entry}, size)


def _as_many_tensors_as_a_header_holds(folder: Path) -> None:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    sparse(folder, {f"t{n}": entry for n in range(17_000)}, 0)


def _patterns_that_backtrack(folder: Path) -> None:
    patterns = {f"(a+)+{n}$": 4 for n in range(200)} | {".*.*.*.*.*.*x" * 20: 4}
    files = AdapterFiles(config_json(rank_pattern=patterns), good_adapter(BASE).weights)
    files.write(folder)


def _a_target_regex_that_backtracks(folder: Path) -> None:
    config = config_json(target_modules="^(([a-z])+.)+[A-Z]([a-z])+$" * 50)
    AdapterFiles(config, good_adapter(BASE).weights).write(folder)


def _thousands_of_keys_and_patterns(folder: Path) -> None:
    patterns = {f"layers.{n}.q_proj": 4 for n in range(6_000)}
    AdapterFiles(config_json(rank_pattern=patterns), good_adapter(BASE).weights).write(folder)


def _names_as_long_as_a_header_allows(folder: Path) -> None:
    tensors = lora_tensors(BASE)
    first = next(iter(tensors.values()))
    longer = {f"base_model.model.{'x.' * 15_000}{n}": first for n in range(30)}
    AdapterFiles(config_json(), pack(tensors | longer)).write(folder)


HEAVY: list[Callable[[Path], None]] = [
    _half_a_gigabyte_of_one_tensor,
    _as_many_tensors_as_a_header_holds,
    _patterns_that_backtrack,
    _a_target_regex_that_backtracks,
    _thousands_of_keys_and_patterns,
    _names_as_long_as_a_header_allows,
]
"""Files made to cost as much as the bounds let through."""


@pytest.mark.wide
@pytest.mark.parametrize("make", HEAVY, ids=lambda make: make.__name__.strip("_"))
def test_a_file_made_to_be_expensive_costs_seconds_and_megabytes(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / "adapter")
    (cost,) = measure([tmp_path / "adapter"])
    assert os.waitstatus_to_exitcode(cost.status) == 0
    assert cost.cpu_s < CPU_S
    assert cost.rss_bytes < RSS_BYTES


@pytest.mark.wide
@pytest.mark.timeout(900)
def test_no_hostile_kind_costs_more_than_a_good_file_by_much(tmp_path: Path) -> None:
    assert len(HOSTILE) >= 60
    folders = [case.build(BASE).write(tmp_path / str(n)) for n, case in enumerate(HOSTILE)]
    for case, cost in zip(HOSTILE, measure(folders), strict=True):
        assert case.code in cost.codes, case.name
        assert cost.cpu_s < CPU_S, case.name
        assert cost.rss_bytes < RSS_BYTES, case.name
