from hypothesis import given
from hypothesis import strategies as st

from engine.arena import Arena, Span

EXTENTS = 24


class TestTheTwoEnds:
    def test_kv_blocks_are_given_out_from_the_low_end(self) -> None:
        arena = Arena(4)
        assert [arena.take_block() for _ in range(5)] == [0, 1, 2, 3, None]

    def test_the_lowest_free_block_is_given_out_first(self) -> None:
        arena = Arena(4)
        blocks = [arena.take_block() for _ in range(4)]
        arena.give_block(2)
        arena.give_block(0)
        assert blocks == [0, 1, 2, 3]
        assert [arena.take_block(), arena.take_block()] == [0, 2]

    def test_adapters_are_placed_from_the_top(self) -> None:
        arena = Arena(10)
        assert arena.place(0, 3) == Span(7, 3)
        assert arena.place(1, 2) == Span(5, 2)

    def test_kv_grows_up_to_the_lowest_adapter_and_no_further(self) -> None:
        arena = Arena(4)
        arena.place(0, 1)
        assert [arena.take_block() for _ in range(4)] == [0, 1, 2, None]

    def test_the_boundary_moves_back_when_an_adapter_leaves(self) -> None:
        arena = Arena(4)
        arena.place(0, 3)
        assert [arena.take_block(), arena.take_block()] == [0, None]
        arena.release(0)
        assert arena.kv_free == 3
        assert arena.take_block() == 1

    def test_an_adapter_does_not_go_below_a_kv_block(self) -> None:
        arena = Arena(6)
        blocks = [arena.take_block() for _ in range(4)]
        for block in blocks[:3]:
            arena.give_block(block or 0)
        assert arena.place(0, 3) is None
        assert arena.place(0, 2) == Span(4, 2)


class TestCompaction:
    def test_movable_adapters_move_up_into_holes(self) -> None:
        arena = Arena(10)
        for slot in range(3):
            arena.place(slot, 2)
        arena.release(0)
        assert arena.compact(lambda slot: True) == [(1, 8), (2, 6)]
        assert arena.kv_limit == 6

    def test_an_adapter_in_use_stays_where_it_is(self) -> None:
        arena = Arena(10)
        for slot in range(3):
            arena.place(slot, 2)
        arena.release(0)
        assert arena.compact(lambda slot: slot != 1) == [(2, 8)]
        assert arena.span(1) == Span(6, 2)


class TestTheHold:
    def test_nobody_is_given_an_extent_of_the_window(self) -> None:
        arena = Arena(6)
        arena.hold(Span(2, 2))
        assert arena.place(0, 3) is None
        assert arena.place(0, 2) == Span(4, 2)
        assert [arena.take_block() for _ in range(3)] == [0, 1, None]

    def test_a_hole_inside_the_window_is_not_a_hole(self) -> None:
        arena = Arena(6)
        arena.place(0, 3)
        arena.release(0)
        arena.place(1, 1)
        arena.hold(Span(3, 3))  # over the adapter, which has to leave
        arena.compact(lambda slot: True)
        assert arena.place(2, 1) == Span(2, 1)
        assert arena.span(1) == Span(5, 1)

    def test_the_window_is_filled_once_it_is_free(self) -> None:
        arena = Arena(6)
        arena.place(0, 3)
        arena.hold(Span(2, 4))
        assert arena.place_held(1) is None
        arena.release(0)
        assert arena.place_held(1) == Span(2, 4)
        assert arena.held is None

    def test_kv_gets_the_window_back_when_the_hold_is_released(self) -> None:
        arena = Arena(6)
        arena.hold(Span(1, 5))
        assert arena.kv_free == 1
        arena.release_hold()
        assert arena.kv_free == 6


operations = st.one_of(
    st.tuples(st.just("take"), st.just(0)),
    st.tuples(st.just("give"), st.integers(0, EXTENTS)),
    st.tuples(st.just("place"), st.integers(1, 9)),
    st.tuples(st.just("release"), st.integers(0, EXTENTS)),
    st.tuples(st.just("compact"), st.integers(0, 7)),
    st.tuples(st.just("hold"), st.integers(0, EXTENTS - 4)),
    st.tuples(st.just("unhold"), st.just(0)),
)


@given(st.lists(operations, max_size=60))
def test_nothing_ever_overlaps_and_everything_comes_back(trace: list[tuple[str, int]]) -> None:
    arena = Arena(EXTENTS)
    blocks: set[int] = set()
    slots: list[int] = []
    count = 0
    for name, number in trace:
        if name == "take" and (block := arena.take_block()) is not None:
            assert block not in blocks
            blocks.add(block)
        elif name == "give" and blocks:
            block = sorted(blocks)[number % len(blocks)]
            blocks.remove(block)
            arena.give_block(block)
        elif name == "place":
            count += 1
            if arena.place(count, number) is not None:
                slots.append(count)
        elif name == "release" and slots:
            arena.release(slots.pop(number % len(slots)))
        elif name == "compact":
            arena.compact(lambda slot, pinned=number: slot % 8 != pinned)
        elif name == "hold":
            arena.hold(Span(number, 4))
        elif name == "unhold":
            arena.release_hold()
        _check(arena, blocks, slots)
    for block in blocks:
        arena.give_block(block)
    for slot in slots:
        arena.release(slot)
    arena.release_hold()
    assert (arena.kv_free, arena.kv_used, arena.adapter_used) == (EXTENTS, 0, 0)


def _check(arena: Arena, blocks: set[int], slots: list[int]) -> None:
    owned = sorted(blocks)
    for slot in slots:
        span = arena.span(slot)
        owned += range(span.first, span.end)
    assert len(owned) == len(set(owned))
    assert all(0 <= extent < EXTENTS for extent in owned)
    assert arena.kv_used == len(blocks)
    assert arena.adapter_used == len(owned) - len(blocks)
    free_below = [e for e in range(arena.kv_limit) if e not in owned]
    assert arena.kv_free == len(free_below)
    if slots:
        assert max(blocks, default=-1) < min(arena.span(slot).first for slot in slots)
