"""Random rows of logits, each asking for anything."""

from hypothesis import strategies as st

from engine.draws import Draw
from tests.kernels.sample_cases import SampleCase

KINDS = (*("usual",) * 4, *("ties",) * 3, "one token", "no token", "nan", "inf")
EDGE = 2.0**-16
"""So near to 0 and 1 lie tokens that weigh something in fp64 and nothing in fp32."""
DRAWS = st.builds(
    Draw,
    number=st.floats(EDGE, 1 - EDGE, width=32),
    temperature=st.floats(0.0625, 4, width=32),
    top_k=st.one_of(st.just(0), st.integers(1, 60), st.just(100_000)),
    top_p=st.one_of(st.just(1.0), st.floats(0.001, 1)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1)),
)


@st.composite
def sample_cases(draw: st.DrawFn, max_rows: int = 4, max_vocab: int = 300) -> SampleCase:
    row = st.tuples(st.sampled_from(KINDS), st.one_of(DRAWS, DRAWS, DRAWS, st.none()))
    return SampleCase(
        vocab=draw(st.integers(1, max_vocab)),
        rows=tuple(draw(st.lists(row, max_size=max_rows))),
        seed=draw(st.integers(0, 99)),
    )
