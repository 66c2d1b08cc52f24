"""Adapters on their way into the CPU's arena, a bounded number of bytes at a time."""

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.kernels.lora import Lora
from engine.types import AdapterBlob, AdapterLayout


@dataclass(slots=True)
class _Resident:
    layout: AdapterLayout
    first_byte: int


@dataclass(slots=True)
class _Copy:
    blob: AdapterBlob
    first_byte: int
    done: int = 0


class AdapterCopies:
    """Where every slot's adapter lies in the arena, and how much of it has arrived."""

    def __init__(self, arena: npt.NDArray[np.uint8], extent_bytes: int, lora: Lora) -> None:
        """`arena`: uint8 view of the one arena. `lora` is told what is complete."""
        self._arena = arena
        self._extent_bytes = extent_bytes
        self._lora = lora
        self._copies: dict[int, _Copy] = {}  # oldest first
        self._resident: dict[int, _Resident] = {}

    def start(self, slot: int, first_extent: int, blob: AdapterBlob) -> None:
        """Begins a copy. Raises ValueError when the slot is taken or the arena too small."""
        first_byte = first_extent * self._extent_bytes
        if slot in self._copies or slot in self._resident:
            raise ValueError(f"adapter slot {slot} is taken")
        self._check(first_byte, blob.layout.nbytes)
        self._copies[slot] = _Copy(blob, first_byte)

    def poll(self, max_bytes: int) -> list[int]:
        """Copies at most `max_bytes`, oldest first; the slots that became complete."""
        complete = []
        for slot, copy in list(self._copies.items()):
            count = min(max_bytes, copy.blob.layout.nbytes - copy.done)
            at = copy.first_byte + copy.done
            self._arena[at : at + count] = copy.blob.data[copy.done : copy.done + count]
            copy.done += count
            max_bytes -= count
            if copy.done < copy.blob.layout.nbytes:
                break
            del self._copies[slot]
            self._activate(slot, copy.blob.layout, copy.first_byte)
            complete.append(slot)
        return complete

    def move(self, slot: int, first_extent: int) -> None:
        """Moves an adapter, complete or still arriving. The ranges may overlap."""
        first_byte = first_extent * self._extent_bytes
        copy, resident = self._copies.get(slot), self._resident.get(slot)
        if copy is not None:
            self._move_bytes(copy.first_byte, first_byte, copy.done, copy.blob.layout.nbytes)
            copy.first_byte = first_byte
        elif resident is not None:
            nbytes = resident.layout.nbytes
            self._move_bytes(resident.first_byte, first_byte, nbytes, nbytes)
            self._activate(slot, resident.layout, first_byte)
        else:
            raise ValueError(f"adapter slot {slot} holds nothing to move")

    def drop(self, slot: int) -> None:
        """Forgets a slot; nothing happens when it holds nothing."""
        self._copies.pop(slot, None)
        if self._resident.pop(slot, None) is not None:
            self._lora.drop(slot)

    def _activate(self, slot: int, layout: AdapterLayout, first_byte: int) -> None:
        self._lora.activate(slot, layout, first_byte)
        self._resident[slot] = _Resident(layout, first_byte)

    def _move_bytes(self, source: int, destination: int, count: int, nbytes: int) -> None:
        self._check(destination, nbytes)
        base = self._arena.ctypes.data
        ctypes.memmove(base + destination, base + source, count)  # overlap is allowed

    def _check(self, first_byte: int, nbytes: int) -> None:
        if not 0 <= first_byte <= self._arena.size - nbytes:
            raise ValueError(f"an adapter of {nbytes} bytes does not fit at byte {first_byte}")
