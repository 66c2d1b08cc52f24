"""A step is told in one transfer, and the next one is written elsewhere while it is read."""

import pytest
import torch

from engine.cuda.step_buffers import Part, StepBuffers
from tests.fake_device import FakeDevice

PARTS = {
    "tokens": Part((5,), "int64"),
    "asked": Part((2, 3), "float32"),
    "work": Part((7,), "int32"),
}


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


def test_parts_arrive_in_one_transfer_at_addresses_that_stay(device: FakeDevice) -> None:
    buffers = StepBuffers(device, PARTS)
    seen = {name: buffers.on_device(name) for name in PARTS}
    for step in (1, 2, 3):
        buffers.begin()
        for name in PARTS:
            buffers.host(name)[:] = step
        device.log.clear()
        buffers.upload(7)
        assert [entry for entry in device.log if entry[0] == "copy"] == [("copy", "steps")]
        for name, part in PARTS.items():
            assert torch.equal(seen[name], torch.full(part.shape, step, dtype=seen[name].dtype))
            assert seen[name].data_ptr() % 64 == buffers.on_device("tokens").data_ptr() % 64


def test_of_the_last_part_only_what_is_used_is_brought_over(device: FakeDevice) -> None:
    buffers = StepBuffers(device, PARTS)
    buffers.begin()
    buffers.host("work")[:] = 4
    buffers.upload(3)
    assert buffers.on_device("work").tolist() == [4, 4, 4, 0, 0, 0, 0]


def test_a_host_copy_is_written_again_only_after_its_transfer(device: FakeDevice) -> None:
    buffers = StepBuffers(device, PARTS)
    for step in range(5):
        before = len(device.log)
        buffers.begin()
        waited = [entry for entry in device.log[before:] if entry[0] == "host waits"]
        assert len(waited) == (1 if step >= 2 else 0)  # the first two have nothing to wait for
        buffers.host("tokens")[:] = step
        buffers.upload(0)
    device.synchronize()  # fails if anything was overwritten while it was read


def test_the_fake_device_sees_what_is_overwritten_too_early(device: FakeDevice) -> None:
    buffers = StepBuffers(device, PARTS)
    buffers.begin()
    buffers.upload(0)
    buffers.host("tokens")[:] = 9
    with pytest.raises(AssertionError, match="being read"):
        device.synchronize()
