"""Which form of a linear runs, by mode, machine and batch size."""

from pathlib import Path

import pytest
import torch

from engine.model.linear import Linear, PathChoice, choose_path, padded_rows
from engine.model.loader import Weight, open_checkpoint
from tests.model_factories import make_llama, write_gguf


@pytest.fixture
def weight(tmp_path: Path) -> Weight:
    write_gguf(make_llama(), tmp_path / "base.gguf", "Q4_1")
    return open_checkpoint(tmp_path / "base.gguf").weight("model.layers.0.mlp.up_proj.weight")


def test_batch_invariance_takes_one_path_whatever_is_asked() -> None:
    choices = {
        choose_path(path, batch_invariant=True, fast_bf16=fast)
        for path in ("auto", "int4", "dense", "fp32")
        for fast in (True, False)
    }
    assert choices == {PathChoice(int4_rows=0, dense_dtype=torch.float32)}


def test_bf16_is_dense_only_where_the_machine_multiplies_it() -> None:
    assert choose_path("auto", batch_invariant=False, fast_bf16=True).dense_dtype == torch.bfloat16
    assert choose_path("auto", batch_invariant=False, fast_bf16=False).dense_dtype == torch.float32


def test_few_rows_take_the_codes_and_many_the_dense_weight(weight: Weight) -> None:
    auto = Linear([weight], PathChoice(int4_rows=3, dense_dtype=torch.float32))
    int4 = Linear([weight], choose_path("int4", batch_invariant=False, fast_bf16=False))
    dense = Linear([weight], choose_path("fp32", batch_invariant=False, fast_bf16=False))
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(auto(x[:3]), int4(x[:3]))
    assert torch.equal(auto(x[:4]), dense(x[:4]))
    assert not torch.equal(int4(x), dense(x))


def test_few_batch_sizes_are_computed_and_few_rows_wasted() -> None:
    sizes = {rows: padded_rows(rows) for rows in range(1, 513)}
    assert len(set(sizes.values())) < 70
    assert all(rows <= size <= rows + rows // 4 for rows, size in sizes.items())


@pytest.mark.parametrize("rows", [1, 33, 57, 130])
def test_a_padded_batch_returns_its_own_rows(weight: Weight, rows: int) -> None:
    linear = Linear([weight], choose_path("fp32", batch_invariant=False, fast_bf16=False))
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(0))
    want = x @ torch.from_numpy(weight.decode()).T
    torch.testing.assert_close(linear(x), want, atol=1e-4, rtol=0.0)


def test_stacked_weights_give_their_outputs_side_by_side(weight: Weight) -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    for path in ("int4", "fp32"):
        choice = choose_path(path, batch_invariant=False, fast_bf16=False)
        single = Linear([weight], choice)(x)
        torch.testing.assert_close(
            Linear([weight, weight], choice)(x), torch.cat((single, single), dim=1)
        )
