"""What a step is told, in one piece of memory at fixed addresses: one transfer a step.

The host writes a step into locked memory, of which there are two: the next step can be written
while the transfer of the last one still waits for the device.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.cuda.device import Device, Event

ALIGNMENT = 64
HOSTS = 2
_TORCH: dict[str, torch.dtype] = {
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
}


class Part(NamedTuple):
    """`shape` and numpy's name of the type."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


class StepBuffers:
    """Named parts, each on the device and in every host copy. Used by one thread."""

    def __init__(self, device: Device, parts: Mapping[str, Part]) -> None:
        """The last part may be transferred in part."""
        self._device = device
        self._parts = dict(parts)
        self._start: dict[str, int] = {}
        end = 0
        for name, part in parts.items():
            self._start[name] = end
            end += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
        self.nbytes = end
        self._memory = device.empty(end)
        self._hosts = [device.pinned(end) for _ in range(HOSTS)]
        self._uploads: list[Event | None] = [None] * HOSTS
        self._turn = 0

    def on_device(self, name: str) -> Tensor:
        """The part as the device reads it, always at the same address."""
        part, start = self._parts[name], self._start[name]
        flat = self._memory[start : start + part.nbytes].view(_TORCH[part.dtype])
        return flat.view(part.shape)

    def begin(self) -> None:
        """A new step is about to be written: waits until its host copy can be overwritten."""
        self._turn = (self._turn + 1) % HOSTS
        upload = self._uploads[self._turn]
        if upload is not None:
            upload.wait()

    def host(self, name: str) -> npt.NDArray[Any]:
        """The part to be written for the step that has begun."""
        part, start = self._parts[name], self._start[name]
        raw = self._hosts[self._turn].numpy()[start : start + part.nbytes]
        return raw.view(part.dtype).reshape(part.shape)

    def upload(self, last_part_items: int) -> None:
        """Brings the step over, of the last part so many numbers from its beginning."""
        name, part = next(reversed(self._parts.items()))
        end = self._start[name] + last_part_items * np.dtype(part.dtype).itemsize
        self._device.copy("steps", self._memory[:end], self._hosts[self._turn][:end])
        self._uploads[self._turn] = self._device.record("steps")
