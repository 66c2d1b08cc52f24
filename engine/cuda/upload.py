"""Weights on their way to the device, when a model is loaded: in pieces through locked memory.

The device copies from locked memory alone by itself, and what is copied is mapped or was just
decoded. So pieces pass through two halves of one locked buffer: while the device reads one, the
host fills the other. Whatever a matrix's size, no more of it than a piece lies on the host twice.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from engine.cuda.device import Device, Event

PIECE_BYTES = 8 << 20


class Upload:
    """Used by one thread, until `finish`; until then no other stream may read what it made."""

    def __init__(self, device: Device, piece_bytes: int = PIECE_BYTES) -> None:
        self._device = device
        self.torch_device = device.torch_device
        self._halves: list[Tensor] = list(device.pinned(2 * piece_bytes).chunk(2))
        self._read: list[Event | None] = [None, None]  # once the device has read a half

    def tensor(self, source: Tensor) -> Tensor:
        """The same tensor on the device. `source`: of the host; may change once this returns."""
        return self.stacked([source], source.shape, source.dtype)

    def stacked(self, parts: Iterable[Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor on the device whose bytes are those of `parts`, one after the other."""
        with self._device.on("steps"):
            target = torch.empty(shape, dtype=dtype, device=self.torch_device)
        flat, at = _bytes(target), 0
        for part in parts:
            source = _bytes(part)
            self._copy(flat[at : at + source.numel()], source)
            at += source.numel()
        if at != flat.numel():
            raise ValueError(f"{at} bytes came for a tensor of {flat.numel()}")
        return target

    def finish(self) -> None:
        """Returns once the device holds all that was put on its way, and lets the buffer go."""
        self._device.synchronize()
        self._halves.clear()

    def _copy(self, target: Tensor, source: Tensor) -> None:
        step = self._halves[0].numel()
        for start in range(0, source.numel(), step):
            part = source[start : start + step]
            half, read = self._halves[0], self._read[0]
            if read is not None:
                read.wait()
            half[: part.numel()].copy_(part)
            self._device.copy("steps", target[start : start + step], half[: part.numel()])
            self._read[0] = self._device.record("steps")
            self._halves.reverse()
            self._read.reverse()


def _bytes(tensor: Tensor) -> Tensor:
    """uint8, flat; the tensor's own where it is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)
