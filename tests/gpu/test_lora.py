"""Multi-LoRA on a GPU against the plain reference, in the precision that is served.

Needs torch, triton, numpy and pytest alone; on a machine that has nothing else:
python -m pytest -c /dev/null --noconftest tests/gpu
"""

import pytest
import torch

from engine.kernels.lora import Lora
from engine.kernels.reference import ReferenceLora
from tests.kernels.lora_cases import Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROWS = {
    "decode": [0, 1, -1, 2, 3, 0] * 5,
    "one row": [2],
    "base rows only": [-1] * 7,
    "no rows": [],
    "every row its own chunk": [0, 1, 2, 3] * 140,
    "prefill": [0] * 300 + [-1] * 20 + [1] * 300,
}
RANKS = [(8, 16, 64, 4), (0, 256, 1, 0), (33, 0, 7, 16), (64, 64, 64, 64)]
WIDTHS = {"even": (1024, (512, 256, 256)), "odd": (333, (130, 17, 65))}


def on_gpu(case: Case, face: str, **options: object) -> Lora:
    from engine.kernels.lora_cuda import TritonLora

    arena, layouts, first_bytes = case.arena()
    arena = arena.cuda()
    if face == "reference":
        lora: Lora = ReferenceLora(arena, case.modules, slots=4, dtype=case.dtype)
    else:
        limits = {"slots": 4, "max_rows": 1024, "max_rank": 256}
        lora = TritonLora(arena, case.modules, dtype=case.dtype, **limits, **options)
    case.fill(lora, layouts, first_bytes)
    return lora


def run(lora: Lora, case: Case, dtype: torch.dtype, embedding: bool = False) -> torch.Tensor:
    group = case.embedding if embedding else case.fused
    x, tokens, y = (tensor.cuda() for tensor in case.inputs(group))
    y = y.to(dtype)
    batch = lora.new_batch(1024)
    batch.build(case.row_slots)
    if embedding:
        lora.embedding(group, batch, tokens, y)
    else:
        lora.linear(group, batch, x.to(dtype), y)
    return y


@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("row_slots", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("embedding", [False, True], ids=["linear", "embedding"])
def test_the_kernels_equal_the_reference(widths, row_slots, dtype, embedding):
    case = Case(*widths, RANKS, row_slots, dtype)
    torch_dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
    actual = run(on_gpu(case, "triton"), case, torch_dtype, embedding)
    expected = run(on_gpu(case, "reference"), case, torch.float32, embedding)
    tolerance = 2e-2 if dtype == "bf16" else 1e-5
    bound = tolerance * float(expected.abs().max()) if row_slots else 0.0
    torch.testing.assert_close(actual.float(), expected, rtol=0, atol=bound)
    base = torch.tensor([slot < 0 for slot in row_slots], dtype=torch.bool)
    before = case.inputs(case.embedding if embedding else case.fused)[2].to(torch_dtype)
    assert torch.equal(actual.cpu()[base], before[base])


def test_a_row_alone_has_the_same_bits_in_batch_invariant_mode():
    case = Case(1024, (512, 256, 256), RANKS, ROWS["decode"])
    lora = on_gpu(case, "triton", batch_invariant=True)
    together = run(lora, case, torch.bfloat16)
    x, _, y = (tensor.cuda().bfloat16() for tensor in case.inputs(case.fused))
    batch = lora.new_batch(1)
    for row, slot in enumerate(case.row_slots):
        batch.build([slot])
        alone = y[row : row + 1].clone()
        lora.linear(case.fused, batch, x[row : row + 1], alone)
        assert torch.equal(alone[0], together[row])


def test_the_same_call_gives_the_same_bits_every_time():
    case = Case(1024, (512, 256, 256), RANKS, ROWS["decode"])
    lora = on_gpu(case, "triton")
    first = run(lora, case, torch.bfloat16)
    assert all(torch.equal(first, run(lora, case, torch.bfloat16)) for _ in range(50))
