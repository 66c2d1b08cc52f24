import itertools

from hypothesis import given
from hypothesis import strategies as st

from engine.arena import Arena, Span
from engine.kv_blocks import KvBlocks, block_hash, blocks_for, prefix_seed

A = prefix_seed("base", "adapter", "salt")


def pool(extents: int = 4, **values: bool) -> KvBlocks:
    return KvBlocks(Arena(extents), **values)


class TestPrefixSeed:
    @given(st.tuples(*[st.text(max_size=6)] * 3), st.tuples(*[st.text(max_size=6)] * 3))
    def test_two_chains_start_alike_only_for_the_same_base_adapter_and_salt(
        self, one: tuple[str, str, str], other: tuple[str, str, str]
    ) -> None:
        assert (prefix_seed(*one) == prefix_seed(*other)) == (one == other)

    def test_moving_a_character_between_the_parts_changes_the_seed(self) -> None:
        parts = [("ab", "c", "d"), ("a", "bc", "d"), ("a", "b", "cd"), ("abcd", "", "")]
        assert len({prefix_seed(*part) for part in parts}) == len(parts)

    def test_a_block_hash_depends_on_everything_before_it(self) -> None:
        tokens = list(range(16))
        chains = {block_hash(prefix_seed("base", x, y), tokens) for x in "ab" for y in "cd"}
        assert len(chains) == 4
        assert block_hash(A, tokens) != block_hash(A, [1, *tokens[1:]])


def test_blocks_are_rounded_up() -> None:
    assert [blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


class TestReferences:
    def test_a_shared_block_is_given_back_by_its_last_holder(self) -> None:
        kv = pool()
        blocks = kv.take(2) or []
        kv.share(blocks)
        kv.release(blocks)
        assert kv.available == 2
        kv.release(blocks)
        assert kv.available == 4

    def test_nothing_is_taken_when_not_all_can_be(self) -> None:
        kv = pool(3)
        assert kv.take(4) is None
        assert kv.available == 3


class TestPrefixCache:
    def test_a_registered_block_is_found_after_its_sequence_is_over(self) -> None:
        kv = pool()
        blocks = kv.take(2) or []
        kv.register(blocks[0], b"one", None)
        kv.register(blocks[1], b"two", None)
        kv.release(blocks)
        assert kv.match([b"one", b"two", b"three"]) == blocks
        assert (kv.referenced, kv.cached) == (0, 2)

    def test_a_chain_is_matched_up_to_its_first_gap(self) -> None:
        kv = pool()
        blocks = kv.take(2) or []
        kv.register(blocks[1], b"two", None)
        assert kv.match([b"one", b"two"]) == []

    def test_the_least_recently_used_goes_first_and_the_end_before_the_beginning(self) -> None:
        kv = pool(4)
        old, new = kv.take(2) or [], kv.take(2) or []
        for block, digest in zip(old + new, [b"o1", b"o2", b"n1", b"n2"], strict=True):
            kv.register(block, digest, None)
        kv.release(old)
        kv.release(new)
        kv.take(1)
        assert (kv.match([b"o1"]), kv.match([b"o2"])) == ([old[0]], [])
        kv.take(2)
        assert (kv.match([b"n1"]), kv.match([b"n2"])) == ([new[0]], [])

    def test_a_block_in_use_is_never_evicted(self) -> None:
        kv = pool(2)
        blocks = kv.take(2) or []
        kv.register(blocks[0], b"one", None)
        kv.release(blocks)
        kv.share(kv.match([b"one"]))
        assert kv.take(2) is None
        assert kv.take(1) == [blocks[1]]

    def test_switched_off_it_keeps_nothing(self) -> None:
        kv = pool(prefix_caching=False)
        blocks = kv.take(1) or []
        kv.register(blocks[0], b"one", None)
        kv.release(blocks)
        assert (kv.match([b"one"]), kv.cached) == ([], 0)

    def test_erasing_an_owner_removes_its_blocks_and_nobody_elses(self) -> None:
        kv = pool()
        blocks = kv.take(3) or []
        for block, digest, owner in zip(blocks, [b"1", b"2", b"3"], ["x", "y", "x"], strict=True):
            kv.register(block, digest, owner)
        kv.release(blocks[:2])
        assert kv.drop_owner("x") == 2
        assert [kv.match([digest]) for digest in (b"1", b"2", b"3")] == [[], [blocks[1]], []]
        kv.release(blocks[2:])
        assert (kv.referenced, kv.cached, kv.available) == (0, 1, 4)

    def test_clearing_a_window_frees_what_is_cached_and_tells_of_what_is_in_use(self) -> None:
        kv = pool()
        blocks = kv.take(2) or []
        for block in blocks:
            kv.register(block, bytes([block]), None)
        kv.release(blocks[1:])
        assert not kv.clear(Span(0, 4))
        assert kv.cached == 0
        kv.release(blocks[:1])
        assert kv.clear(Span(0, 4))


@given(st.lists(st.tuples(st.sampled_from("trsfx"), st.integers(0, 20)), max_size=80))
def test_every_block_is_free_cached_or_referenced_whatever_happens(
    trace: list[tuple[str, int]],
) -> None:
    arena = Arena(8)
    kv = KvBlocks(arena)
    held: list[list[int]] = []
    names = itertools.count()
    for action, number in trace:
        if action == "t" and (taken := kv.take(1 + number % 3)):
            held.append(taken)
        elif action == "r" and held:
            for block in held[number % len(held)]:
                kv.register(block, str(next(names)).encode(), number % 2)
        elif action == "s" and held:
            shared = held[number % len(held)]
            kv.share(shared)
            held.append(list(shared))
        elif action == "f" and held:
            kv.release(held.pop(number % len(held)))
        elif action == "x":
            kv.drop_owner(number % 2)
        assert kv.referenced == len({block for blocks in held for block in blocks})
        assert kv.referenced + kv.cached == arena.kv_used
        assert kv.available == 8 - kv.referenced
    for blocks in held:
        kv.release(blocks)
    kv.drop_owner(0)
    kv.drop_owner(1)
    assert (kv.referenced, kv.cached, arena.kv_free) == (0, 0, 8)
