"""Weights reach the device whole, through a locked buffer that holds two pieces."""

import pytest
import torch

from engine.cuda.upload import Upload
from tests.fake_device import FakeDevice

PIECE = 256


class CountingDevice(FakeDevice):
    def __init__(self) -> None:
        super().__init__()
        self.locked: list[int] = []

    def pinned(self, nbytes: int) -> torch.Tensor:
        self.locked.append(nbytes)
        return super().pinned(nbytes)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 32, 33, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_a_tensor_of_any_size_arrives_whole(rows: int, dtype: torch.dtype) -> None:
    device = CountingDevice()
    upload, source = Upload(device, PIECE), numbers(rows, 5, dtype=dtype)
    arrived = upload.tensor(source)
    upload.finish()
    assert (arrived.dtype, arrived.shape) == (dtype, source.shape)
    assert torch.equal(arrived.view(torch.uint8), source.view(torch.uint8))
    assert device.locked == [2 * PIECE]


def test_parts_lie_on_top_of_one_another() -> None:
    upload, source = Upload(FakeDevice(), PIECE), numbers(60, 7)
    arrived = upload.stacked(source.split([1, 40, 19]), source.shape, source.dtype)
    upload.finish()
    assert torch.equal(arrived, source)


def test_a_transposed_source_arrives_in_the_order_of_its_rows() -> None:
    upload, source = Upload(FakeDevice(), PIECE), numbers(40, 9)
    assert torch.equal(upload.tensor(source.T), source.T)


def test_the_host_waits_for_a_half_that_is_still_read() -> None:
    device = FakeDevice()
    upload = Upload(device, PIECE)
    upload.tensor(numbers(4 * PIECE // 4))  # four pieces of fp32
    order = [entry[0] for entry in device.log]
    assert order == ["copy", "copy", "host waits", "copy", "host waits", "copy"]
    upload.finish()  # the device fails here if a half was written while it was read


def test_parts_that_do_not_fill_the_tensor_are_refused() -> None:
    upload = Upload(FakeDevice(), PIECE)
    with pytest.raises(ValueError, match="40 bytes came for a tensor of 80"):
        upload.stacked([numbers(2, 5)], torch.Size((4, 5)), torch.float32)
