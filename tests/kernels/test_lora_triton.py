"""Runs the proofs of the Triton kernels, each in a process of its own.

Whether a kernel is interpreted is settled when its module is imported, and an interpreted kernel
cannot be compiled, so neither proof can share this process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("file", "interpret"), [("interpreted_lora.py", "1"), ("compiled_lora.py", "0")]
)
def test_every_proof_in(file, interpret):
    environment = {**os.environ, "TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / file)]
    done = subprocess.run(command, cwd=HERE.parent.parent, env=environment, capture_output=True)
    assert done.returncode == 0, done.stdout.decode()
    assert b" passed" in done.stdout
