"""Adapters on their way into the arena: bounded pieces, moves that overlap, nothing left behind."""

import numpy as np
import pytest

from engine.adapter_copies import AdapterCopies
from engine.types import AdapterBlob, AdapterLayout

EXTENT = 64


class ActiveSlots:
    """Stands in for the LoRA table: which slot begins at which byte."""

    def __init__(self) -> None:
        self.first_byte: dict[int, int] = {}

    def activate(self, slot: int, layout: AdapterLayout, first_byte: int) -> None:
        self.first_byte[slot] = first_byte

    def drop(self, slot: int) -> None:
        self.first_byte.pop(slot, None)


def blob(nbytes: int, seed: int = 0) -> AdapterBlob:
    data = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return AdapterBlob(AdapterLayout((), "fp32", 0, nbytes), data)


@pytest.fixture
def active() -> ActiveSlots:
    return ActiveSlots()


@pytest.fixture
def arena() -> np.ndarray:
    return np.zeros(16 * EXTENT, np.uint8)


@pytest.fixture
def copies(arena: np.ndarray, active: ActiveSlots) -> AdapterCopies:
    return AdapterCopies(arena, EXTENT, active)


def test_a_poll_moves_no_more_than_it_may(copies, arena, active) -> None:
    source = blob(150)
    copies.start(0, 2, source)
    for copied in (60, 120):
        assert copies.poll(60) == []
        assert np.count_nonzero(arena) == np.count_nonzero(source.data[:copied])
        assert active.first_byte == {}
    assert copies.poll(60) == [0]
    assert np.array_equal(arena[128:278], source.data)
    assert active.first_byte == {0: 128}


def test_one_poll_may_finish_several(copies) -> None:
    copies.start(3, 0, blob(50))
    copies.start(1, 4, blob(50))
    copies.start(2, 8, blob(50))
    assert copies.poll(120) == [3, 1]
    assert copies.poll(120) == [2]


@pytest.mark.parametrize("first_extent", [0, 3, 5, 9])
def test_a_move_may_overlap(copies, arena, active, first_extent: int) -> None:
    source = blob(6 * EXTENT)
    copies.start(0, 4, source)
    copies.poll(1 << 20)
    copies.move(0, first_extent)
    at = first_extent * EXTENT
    assert np.array_equal(arena[at : at + 6 * EXTENT], source.data)
    assert active.first_byte == {0: at}


def test_a_copy_under_way_can_be_moved(copies, arena, active) -> None:
    source = blob(4 * EXTENT)
    copies.start(0, 4, source)
    copies.poll(100)
    copies.move(0, 10)
    assert active.first_byte == {}
    assert copies.poll(1 << 20) == [0]
    assert np.array_equal(arena[640:896], source.data)


def test_a_dropped_copy_never_arrives(copies, active) -> None:
    copies.start(0, 4, blob(100))
    copies.poll(10)
    copies.drop(0)
    copies.drop(0)
    assert copies.poll(1 << 20) == []
    copies.start(0, 4, blob(100))
    assert copies.poll(1 << 20) == [0]
    copies.drop(0)
    assert active.first_byte == {}


@pytest.mark.parametrize("first_extent", [15, 16, -1])
def test_what_does_not_fit_is_refused(copies, first_extent: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        copies.start(0, first_extent, blob(65))


def test_a_taken_slot_is_refused(copies) -> None:
    copies.start(0, 0, blob(10))
    with pytest.raises(ValueError, match="taken"):
        copies.start(0, 4, blob(10))
    copies.poll(10)
    with pytest.raises(ValueError, match="taken"):
        copies.start(0, 4, blob(10))
    with pytest.raises(ValueError, match="nothing to move"):
        copies.move(1, 4)
