"""`python -m benchmarks.kernels`: right faces pass, a wrong one is told, and counts are right."""

import pytest
import torch

from benchmarks import kernels, roofline
from benchmarks.kernels_parts import adapters
from benchmarks.kernels_parts.case import Case, Sizes, Target, Trial, difference, largest
from benchmarks.kernels_parts.sample import wrong
from benchmarks.roofline import Work
from benchmarks.step_roofline import LLAMA_8B, Shape
from engine.kernels import sample
from engine.kernels.metadata import layer_groups

TINY = Shape("tiny", 1, 128, 256, 4, 2, 32, 96, 5, 8.5)


def test_every_face_of_the_cpu_equals_its_reference_and_is_timed(capsys) -> None:
    target = Target(TINY, Sizes((1, 3), 40, 20), torch.device("cpu"), triton=False)
    assert kernels.run(target, 1e10, 1e11)
    lines = capsys.readouterr().out.splitlines()[1:]
    assert {line.split(",")[0] for line in lines if "lora, torch" in line} == {"lora"}
    for part in ("norm", "gate", "rotary", "attention", "int4", "fp8", "draw", "lora"):
        assert any(line.startswith(part) and line.endswith("%") for line in lines), part


def test_a_wrong_kernel_is_told_and_not_timed(monkeypatch, capsys) -> None:
    class Part:
        @staticmethod
        def cases(target: Target) -> list[Case]:
            return [Case("bad", Work(8), lambda: Trial(pytest.fail, lambda: float("nan")))]

    monkeypatch.setattr(kernels, "PARTS", (Part,))
    assert not kernels.run(Target(TINY, Sizes((1,), 1, 1), torch.device("cpu"), triton=False), 1, 1)
    assert "WRONG" in capsys.readouterr().out


def test_without_a_gpu_the_floors_of_an_h200_are_counted_for_every_kernel(
    monkeypatch, capsys
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernels.main(["--device", "h200", "--bandwidth", "1e12", "--flops", "1e15"]) == 0
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert "1000 GB/s" in head
    floor = {line[:60].strip(): line.split()[-3:] for line in lines}
    assert floor["int4 gate_up, 1 rows"][0] == "60.621"
    assert float(floor["int4 gate_up, 1 rows"][2]) == pytest.approx(0.0606, abs=1e-4)
    assert any(name.startswith("int4 + lora down") for name in floor)
    assert any("window of 256" in name for name in floor)
    assert any("heads of 64" in name for name in floor)


def test_adapters_on_every_linear_weigh_what_the_roofline_says() -> None:
    modules = adapters.layer_modules(LLAMA_8B)
    group, slots = layer_groups(modules, 0).qkv, [0, 1, 1, -1, 5]
    whole = adapters.make(modules, mixed=False)
    expected = roofline.lora([8, 16, 16, 16], [8, 16, 16], 3, 4096, 6144)
    assert adapters.linear_work(whole, group, slots) == expected
    parts = adapters.make(modules, mixed=True)
    assert parts.rank(0, 0) == 0  # left out
    assert parts.rank(7, 0) == 256


def test_a_token_that_no_close_number_would_draw_is_wrong() -> None:
    logits = torch.zeros(1, 8)
    asked = torch.from_numpy(sample.parameters([None]))
    assert wrong(torch.tensor([0]), logits, asked) == 0
    assert wrong(torch.tensor([3]), logits, asked) == 1


def test_a_result_that_is_not_a_number_is_never_close() -> None:
    bad = difference(torch.tensor([float("nan"), 1.0]), torch.tensor([1.0, 1.0]))
    assert largest(0.0, bad) == float("inf")
