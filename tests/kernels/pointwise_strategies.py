"""Random cases for the pointwise operations."""

import torch
from hypothesis import strategies as st

from tests.kernels.pointwise_cases import RotaryCase

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@st.composite
def rotary_cases(draw: st.DrawFn, max_rows: int = 4, max_group: int = 3) -> RotaryCase:
    """Heads of both served sizes, in groups or alone; from no row to rows of padding alone."""
    rows, kv_heads = draw(st.integers(0, max_rows)), draw(st.integers(1, 3))
    return RotaryCase(
        rows,
        heads=kv_heads * draw(st.integers(1, max_group)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([64, 128])),
        dtype=draw(DTYPES),
        norm=draw(st.booleans()),
        padding=draw(st.integers(0, rows)),
        seed=draw(st.integers(0, 99)),
    )


@st.composite
def row_shapes(
    draw: st.DrawFn, max_rows: int = 4, max_width: int = 1500
) -> tuple[int, int, torch.dtype]:
    """(rows, width, dtype): any width, also of one column and of several tiles."""
    return draw(st.integers(0, max_rows)), draw(st.integers(1, max_width)), draw(DTYPES)
