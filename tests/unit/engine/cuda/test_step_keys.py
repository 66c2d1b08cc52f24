"""The one rule for shapes: every step has one, they are few, and ranks never make new ones."""

import pytest

from engine.cuda.step_keys import CHUNK_ROWS, StepKey, StepKeys, chunk_classes
from engine.kernels.lora_triton import SPLIT, WHOLE

KEYS = StepKeys.of(max_running=64, max_batch_tokens=512, max_rank=256)


def test_sizes_are_few_and_end_with_the_bounds() -> None:
    assert KEYS.graph_rows == (1, 2, 4, 8, 16, 24, 32, 48, 64)
    assert KEYS.eager_rows == (16, 32, 64, 128, 192, 256, 320, 384, 448, 512)
    assert KEYS.ranks == (0, 16, 64, 256)


@pytest.mark.parametrize(("running", "tokens"), [(1, 1), (7, 100), (65, 130), (300, 3000)])
def test_odd_bounds_are_sizes_too(running: int, tokens: int) -> None:
    keys = StepKeys.of(max_running=running, max_batch_tokens=tokens, max_rank=8)
    assert keys.graph_rows[-1] == min(running, 256)
    assert (keys.eager_rows[-1], keys.sample_rows[-1]) == (tokens, running)
    for sizes in (keys.graph_rows, keys.eager_rows, keys.sample_rows):
        assert list(sizes) == sorted(set(sizes))


def test_every_step_has_a_shape_among_those_that_were_prepared() -> None:
    prepared = {*KEYS.captured(), *KEYS.eager()}
    assert len(prepared) == len(KEYS.captured()) + len(KEYS.eager())
    for rows in range(1, 513):
        for rank in range(0, 257, 5):
            for decodes, chunks in ((True, -(-rows // 16)), (True, rows), (False, rows)):
                key = KEYS.key(rows, rank, chunks, decodes=decodes)
                assert key in prepared
                assert key.rows >= rows
                assert key.rank >= rank
                assert (key.rank == 0) == (rank == 0)
                assert not (key.captured and rank) or key.chunks >= chunks


def test_padding_stays_below_a_half_or_sixteen_rows() -> None:
    for rows in range(1, 513):
        assert KEYS.key(rows, 0, 0, decodes=False).rows < max(2 * rows, 17)
        if rows <= 64:
            assert KEYS.key(rows, 0, 0, decodes=True).rows < max(2 * rows, 2)


def test_decodes_replay_a_graph_and_steps_with_prompts_do_not() -> None:
    assert KEYS.key(33, 9, 3, decodes=True) == StepKey(48, 16, 3, captured=True)
    assert KEYS.key(33, 9, 3, decodes=False) == StepKey(64, 256, 0, captured=False)
    assert KEYS.key(65, 0, 0, decodes=True) == StepKey(128, 0, 0, captured=False)


def test_few_adapters_start_fewer_programs_than_many() -> None:
    assert chunk_classes(64) == (4, 16, 64)
    assert chunk_classes(1) == (1,)
    assert [KEYS.key(64, 8, chunks, decodes=True).chunks for chunks in (4, 5, 17)] == [4, 16, 64]


@pytest.mark.parametrize(("rows", "rank"), [(513, 0), (1, 257)])
def test_what_exceeds_the_bounds_is_refused(rows: int, rank: int) -> None:
    with pytest.raises(ValueError, match="exceed the largest step"):
        KEYS.key(rows, rank, 1, decodes=False)


def test_the_largest_graph_is_captured_first() -> None:
    assert KEYS.captured()[0] == StepKey(64, 256, 64, captured=True)
    assert KEYS.eager()[0] == StepKey(512, 256, 0, captured=False)


def test_chunks_are_cut_as_the_kernels_cut_them() -> None:
    assert {SPLIT.rows, WHOLE.rows} == {CHUNK_ROWS}
