"""The cases of `python -m benchmarks.kernels` on the Triton faces, under Triton's interpreter."""

import pytest
import torch

from benchmarks import kernels
from benchmarks.kernels_parts.case import TOLERANCE, Sizes, Target
from benchmarks.step_roofline import Shape

TARGET = Target(
    Shape("tiny", 1, 128, 128, 2, 1, 128, 96, 4.125, 16),
    Sizes((1, 3), 40, 20),
    torch.device("cpu"),
    triton=True,
)
NAMES = (
    "norm, 3 rows",
    "norm with residual, 3 rows",
    "gate, 3 rows",
    "rotary with KV write, 3 rows",
    "rotary with KV write, head norm, 3 rows",
    "attention, decode of 3 at 40",
    "attention, prompt, window of 10",
    "attention, decode, heads of 64",
    "int4 qkv, 3 rows",
    "int4 groups of 64 with zeros, float16, 1 rows",
    "draw, top-p, 3 rows",
    "lora o, 64 rows, ranks 1 to 256, parts absent",
    "lora embedding, 32 rows",
    "int4 + lora o, 16 rows of 16, separate",
    "int4 + lora o, 16 rows of 16, fused",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_case_that_is_timed_on_a_gpu_equals_its_reference(name):
    (case,) = (case for case in kernels.cases(TARGET, name) if case.name == name)
    trial = case.open()
    assert trial is not None
    trial.call()
    assert trial.error() < TOLERANCE
