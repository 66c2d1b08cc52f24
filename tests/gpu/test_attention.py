"""Paged attention on a GPU against the plain reference, and the bits it promises."""

from dataclasses import replace

import pytest
import torch

from engine.kernels.attention_cuda import TritonAttention
from tests.kernels.attention_cases import CASES, LAYER, AttentionCase

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TORCH_DTYPE = {"bf16": torch.bfloat16, "fp32": torch.float32}
LARGE = {
    "long decodes": AttentionCase(((4000, 1), (900, 1), (2047, 1)), heads=32, kv_heads=8),
    "a long chunk": AttentionCase(((500, 200), (10, 1)), heads=32, kv_heads=8, head_dim=128),
}
LIMITS = {"max_rows": 512, "max_blocks": 2048}


def run(case: AttentionCase, **options: object) -> torch.Tensor:
    cache, chunks = case.cache("cuda")
    dtype = TORCH_DTYPE[case.dtype]
    attention = TritonAttention(cache, **{**LIMITS, "dtype": dtype, **options})
    attention.build(chunks)
    q = case.queries().to("cuda", dtype)
    return attention.attend(LAYER, q, q, q)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("name", [*CASES, *LARGE])
def test_any_step_is_right(name, batch_invariant):
    case = {**CASES, **LARGE}[name]
    actual = run(case, batch_invariant=batch_invariant).float().cpu()
    tolerance = 2e-2 if case.dtype == "bf16" else 1e-4
    torch.testing.assert_close(actual, case.expected(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["decodes", "a window", "long decodes"])
def test_splits_attended_apart_or_in_turn_give_the_same_bits(name):
    case = {**CASES, **LARGE}[name]
    apart = run(case)
    assert torch.equal(run(case, max_partials=0), apart)
    assert torch.equal(run(case), apart)


def test_batch_invariant_rows_keep_their_bits_however_a_prompt_is_cut():
    whole = AttentionCase(((700, 40),), heads=8, kv_heads=2)
    cache, (chunk,) = whole.cache("cuda")
    q = whole.queries().to("cuda", torch.bfloat16)
    results = []
    for cuts in ([40], [1] * 40, [5, 35]):
        attention = TritonAttention(cache, max_rows=80, max_blocks=4096, batch_invariant=True)
        pieces, done = [], 0
        for count in cuts:
            pieces.append(replace(chunk, first=done, count=count, start=700 + done))
            done += count
        attention.build(pieces)
        results.append(attention.attend(LAYER, q, q, q))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
