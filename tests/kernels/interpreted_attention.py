"""The paged attention kernels under Triton's interpreter, against the plain reference."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from engine.kernels.attention_cuda import TritonAttention
from tests.kernels.attention_cases import CASES, LAYER, AttentionCase

TORCH_DTYPE = {"bf16": torch.bfloat16, "fp32": torch.float32}


def run(case: AttentionCase, **options: object) -> Tensor:
    cache, chunks = case.cache()
    limits = {"max_rows": 80, "max_blocks": 160, "dtype": TORCH_DTYPE[case.dtype]}
    attention = TritonAttention(cache, **{**limits, **options})
    attention.build(chunks)
    q = case.queries()
    return attention.attend(LAYER, q, q, q)


def check(case: AttentionCase, **options: object) -> Tensor:
    actual = run(case, **options)
    torch.testing.assert_close(actual, case.expected(), rtol=0, atol=2e-5)
    return actual


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_any_step_is_right(case):
    check(case)


@pytest.mark.parametrize("name", ["chunks and decodes", "a window", "groups of three"])
def test_a_step_in_batch_invariant_mode_is_right(name):
    check(CASES[name], batch_invariant=True)


@pytest.mark.parametrize("name", ["decodes", "a window", "groups of three"])
def test_splits_attended_apart_or_in_turn_give_the_same_bits(name):
    apart = run(CASES[name])
    for room in (0, 3):  # partial results: for none, for some
        assert torch.equal(run(CASES[name], max_partials=room), apart)


@pytest.fixture
def _rows_multiplied_alone(monkeypatch):
    """A row of BLAS's product depends on its place in the matrix; a tensor core's does not."""

    def dot(builder, a, b, d, *_):
        product = np.concatenate([a.data[i : i + 1] @ b.data for i in range(len(a.data))])
        return TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


@pytest.mark.usefixtures("_rows_multiplied_alone")
def test_batch_invariant_rows_keep_their_bits_however_a_prompt_is_cut():
    whole = AttentionCase(((260, 14),), heads=8, kv_heads=2)
    cache, (chunk,) = whole.cache()
    q = whole.queries()
    results = []
    for cuts in ([14], [1] * 14, [5, 9]):
        attention = TritonAttention(cache, max_rows=80, max_blocks=320, batch_invariant=True)
        pieces, done = [], 0
        for count in cuts:
            pieces.append(replace(chunk, first=done, count=count, start=260 + done))
            done += count
        attention.build(pieces)
        results.append(attention.attend(LAYER, q, q, q))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_heads_of_another_size_are_refused():
    case = AttentionCase(((0, 1),), head_dim=32)
    with pytest.raises(ValueError, match="heads of 32"):
        run(case)


@st.composite
def steps(draw: st.DrawFn, longest: int = 600) -> AttentionCase:
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 4), (3, 3), (2, 7), (1, 16)]))
    context = st.integers(0, longest)
    queries = st.one_of(st.just(1), st.integers(1, 20))
    return AttentionCase(
        tuple(draw(st.lists(st.tuples(context, queries), max_size=4))),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([64, 128])),
        window=draw(st.sampled_from([None, None, 1, 16, 250])),
        dtype=draw(st.sampled_from(["bf16", "fp32"])),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.wide
@given(case=steps(), batch_invariant=st.booleans(), partials=st.sampled_from([0, 5, 2048]))
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_random_steps_are_right(case, batch_invariant, partials):
    check(case, batch_invariant=batch_invariant, max_partials=partials, max_blocks=320)


def test_one_grid_serves_every_step_of_decodes_with_the_same_bits():
    case = CASES["decodes"]
    cache, chunks = case.cache()
    q = case.queries()
    attention = TritonAttention(
        cache, max_rows=80, max_blocks=160, max_partials=16, dtype=TORCH_DTYPE[case.dtype]
    )
    attention.build(chunks)
    exact = attention.attend(LAYER, q, q, q)
    buffer = torch.zeros(attention.work.buffer.size, dtype=torch.int32)
    attention.place(buffer)
    attention.grid = attention.decode_grid(2 * case.rows)
    attention.build(chunks)
    used = attention.work.used
    buffer[:used] = torch.from_numpy(attention.work.buffer)[:used]
    assert torch.equal(attention.attend(LAYER, q, q, q), exact)
