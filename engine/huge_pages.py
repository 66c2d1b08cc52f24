"""Memory in large pages, where the system has them.

What a step reads (weights, KV blocks, adapters) is far larger than what a processor can translate
addresses for in pages of 4 KiB, all the more in a virtual machine, where each translation is two.
"""

import contextlib
import mmap

import torch
from torch import Tensor

_PAGE = 2 << 20
_PIECE = 16 << 20
_ALIGNMENT = 64


def zeros(nbytes: int) -> Tensor:
    """uint8 [nbytes], zero, a storage of its own; memory is taken as it is touched."""
    room = mmap.mmap(-1, max(1, nbytes) + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a system without them
        room.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(room, dtype=torch.uint8)
    first = -whole.data_ptr() % _PAGE
    if not nbytes:
        return whole[:0]
    return torch.frombuffer(room, dtype=torch.uint8, count=nbytes, offset=first)


class Region:
    """Hands out pieces of such memory, 64-byte aligned, that are never given back."""

    def __init__(self) -> None:
        self._piece, self._used = zeros(0), 0

    def take(self, nbytes: int) -> Tensor:
        """uint8 [nbytes], zero."""
        if nbytes > _PIECE // 2:
            return zeros(nbytes)
        if self._used + nbytes > self._piece.numel():
            self._piece, self._used = zeros(_PIECE), 0
        start = self._used
        self._used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return self._piece[start : start + nbytes]
