"""Runs the proofs of the Triton kernels, each in a process of its own, side by side.

Whether a kernel is interpreted is settled when its module is imported, and an interpreted kernel
cannot be compiled, so neither proof can share this process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROOFS = {"interpreted_lora.py": "1", "compiled_lora.py": "0"}  # TRITON_INTERPRET


@pytest.fixture(scope="module")
def proofs(tmp_path_factory):
    """(process, file of its output) by name."""
    logs = tmp_path_factory.mktemp("proofs")
    started = {}
    for name, interpret in PROOFS.items():
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", HERE / name]
        environment = {**os.environ, "TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1"}
        with (logs / name).open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=HERE.parent.parent,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        started[name] = (process, logs / name)
    yield started
    for process, _ in started.values():
        process.kill()
        process.wait()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PROOFS)
def test_every_proof_in(name, proofs):
    process, log = proofs[name]
    failed = process.wait()
    assert not failed, log.read_text()
    assert " passed" in log.read_text()
