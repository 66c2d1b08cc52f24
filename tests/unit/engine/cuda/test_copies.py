"""Adapters arrive beside running steps: nothing is used too early, nothing overwritten too soon."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.cuda.copies import DeviceCopies, pieces
from tests.fake_device import FakeDevice
from tests.unit.engine.test_adapter_copies import EXTENT, ActiveSlots, blob


class Setting:
    def __init__(self) -> None:
        self.device = FakeDevice()
        self.arena = self.device.empty(16 * EXTENT)
        self.active = ActiveSlots()
        self.copies = DeviceCopies(self.device, self.arena, EXTENT, self.active)

    def at_tensor(self, extent: int, nbytes: int) -> torch.Tensor:
        return self.arena[extent * EXTENT :][:nbytes]

    def at(self, extent: int, nbytes: int) -> np.ndarray:
        return self.arena.numpy()[extent * EXTENT :][:nbytes]


@pytest.fixture
def setting() -> Setting:
    return Setting()


def test_a_slot_is_usable_once_its_copy_has_arrived_and_not_before(setting: Setting) -> None:
    source = blob(150)
    setting.copies.start(3, 2, source)
    assert setting.copies.poll() == []
    assert setting.active.first_byte == {}
    setting.device.finish_copies()
    assert setting.copies.poll() == [3]
    assert setting.active.first_byte == {3: 128}
    assert np.array_equal(setting.at(2, 150), source.data)
    assert setting.copies.poll() == []


def test_copies_become_usable_one_by_one_in_their_order(setting: Setting) -> None:
    for slot, extent in ((5, 0), (1, 4), (2, 8)):
        setting.copies.start(slot, extent, blob(50))
    setting.device.finish_copies(2)
    assert setting.copies.poll() == [5, 1]
    setting.device.finish_copies()
    assert setting.copies.poll() == [2]


def test_a_copy_begins_after_the_steps_that_may_still_use_its_place(setting: Setting) -> None:
    setting.copies.start(0, 0, blob(10))
    assert setting.device.log == [("copies wait", "steps"), ("copy", "copies")]


def test_steps_come_after_a_copy_that_was_dropped_on_its_way(setting: Setting) -> None:
    setting.copies.start(0, 0, blob(100))
    setting.copies.drop(0)
    setting.device.copy("steps", setting.at_tensor(0, 100), torch.full((100,), 9).byte())
    setting.device.finish_copies()
    assert (setting.at(0, 100) == 9).all(), "the dropped copy overwrote what a step had written"
    assert setting.copies.poll() == []
    assert setting.active.first_byte == {}


@pytest.mark.parametrize("first_extent", [0, 3, 5, 9])
@pytest.mark.parametrize("arrived", [True, False])
def test_a_move_may_overlap_whether_the_adapter_has_arrived_or_not(
    setting: Setting, first_extent: int, arrived: bool
) -> None:
    source = blob(6 * EXTENT)
    setting.copies.start(0, 4, source)
    if arrived:
        setting.device.finish_copies()
        setting.copies.poll()
    setting.copies.move(0, first_extent)
    setting.device.finish_copies()
    setting.copies.poll()
    assert np.array_equal(setting.at(first_extent, 6 * EXTENT), source.data)
    assert setting.active.first_byte == {0: first_extent * EXTENT}


def test_moves_keep_the_order_of_steps(setting: Setting) -> None:
    setting.copies.start(0, 4, blob(3 * EXTENT))
    setting.device.finish_copies()
    setting.copies.poll()
    setting.device.log.clear()
    setting.copies.move(0, 3)
    assert setting.device.log == [("copy", "steps")] * 3


def test_a_place_is_bounded_and_a_slot_taken_once(setting: Setting) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        setting.copies.start(0, 15, blob(2 * EXTENT))
    setting.copies.start(0, 0, blob(10))
    with pytest.raises(ValueError, match="taken"):
        setting.copies.start(0, 4, blob(10))
    with pytest.raises(ValueError, match="nothing to move"):
        setting.copies.move(1, 0)


def test_a_dropped_slot_can_be_filled_again(setting: Setting) -> None:
    setting.copies.start(0, 0, blob(10))
    setting.device.finish_copies()
    setting.copies.poll()
    setting.copies.drop(0)
    assert setting.active.first_byte == {}
    setting.copies.drop(0)
    setting.copies.start(0, 2, blob(10, seed=1))
    setting.device.finish_copies()
    assert setting.copies.poll() == [0]


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 60))
def test_parts_moved_in_turn_move_the_whole(source: int, destination: int, nbytes: int) -> None:
    memory = np.arange(100)
    wanted = memory[source : source + nbytes].copy()
    for start, stop in pieces(source, destination, nbytes):
        assert abs(source - destination) >= stop - start > 0
        part = memory[source + start : source + stop].copy()
        memory[destination + start : destination + stop] = part
    assert np.array_equal(memory[destination : destination + nbytes], wanted)
