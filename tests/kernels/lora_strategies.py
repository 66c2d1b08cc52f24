"""Random cases for the LoRA kernels."""

from hypothesis import strategies as st

from tests.kernels.lora_cases import Case


@st.composite
def cases(draw: st.DrawFn, max_rows: int = 40, max_rank: int = 256) -> Case:
    """Any ranks, mixed, with absent modules, odd widths, and batches from none to all-base rows."""
    usual = [rank for rank in (8, 16, 32, 64, max_rank) if rank <= max_rank]
    rank = st.one_of(st.just(0), st.integers(1, max_rank), st.sampled_from(usual))
    ranks = draw(st.lists(st.tuples(rank, rank, rank, rank), min_size=1, max_size=4))
    slot = st.integers(-1, len(ranks) - 1)
    return Case(
        in_features=draw(st.integers(1, 150)),
        out_features=draw(st.tuples(*[st.integers(1, 150)] * 3)),
        ranks=ranks,
        row_slots=draw(st.lists(slot, max_size=max_rows)),
        dtype=draw(st.sampled_from(["bf16", "fp32"])),
        seed=draw(st.integers(0, 1000)),
    )
