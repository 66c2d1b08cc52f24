"""Runs the proofs of the Triton kernels in two processes of their own, side by side.

Whether a kernel is interpreted is settled when its module is imported, and an interpreted kernel
cannot be compiled, so neither proof can share this process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROOFS = {"interpreted": "1", "compiled": "0"}  # TRITON_INTERPRET
OLD_INTERPRETER = "ignore:Conversion of an array with ndim:DeprecationWarning"  # Triton 3.6


def start(proof: str, marker: str, log: Path) -> subprocess.Popen[bytes]:
    files = sorted(HERE.glob(f"{proof}_*.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marker]
    command += ["--timeout", "900", "-W", OLD_INTERPRETER, *files]
    environment = {**os.environ, "TRITON_INTERPRET": PROOFS[proof], "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            cwd=HERE.parent.parent,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def check(process: subprocess.Popen[bytes], log: Path) -> None:
    try:
        failed = process.wait()
    finally:
        process.kill()
        process.wait()
    assert not failed, log.read_text()
    assert " passed" in log.read_text()


@pytest.fixture(scope="module")
def proofs(tmp_path_factory):
    """(process, file of its output) by name."""
    logs = tmp_path_factory.mktemp("proofs")
    started = {name: (start(name, "not wide", logs / name), logs / name) for name in PROOFS}
    yield started
    for process, _ in started.values():
        process.kill()
        process.wait()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PROOFS)
def test_every_proof_that_is(name, proofs):
    check(*proofs[name])


@pytest.mark.wide
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PROOFS)
def test_the_wide_sweep_of_what_is(name, tmp_path):
    log = tmp_path / "wide"
    check(start(name, "wide", log), log)
