"""Adapters on their way into the arena beside running steps, and where those lie that have arrived.

A copy is put whole onto the stream "copies", behind everything that steps were told before it: what
they still read or write in its place is over when it begins. It becomes usable once its event has
passed; until then no step knows of it. Moves and table updates go onto the stream of the steps,
whose order keeps them apart from steps in flight.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cuda.device import Device, Event
from engine.kernels.lora import Lora
from engine.types import AdapterBlob, AdapterLayout


@dataclass(slots=True)
class _Resident:
    layout: AdapterLayout
    first_byte: int


@dataclass(slots=True)
class _Copy:
    blob: AdapterBlob  # held until the device has read it
    first_byte: int
    arrived: Event


class DeviceCopies:
    """As engine.adapter_copies.AdapterCopies; called by the thread that launches steps."""

    def __init__(self, device: Device, arena: Tensor, extent_bytes: int, lora: Lora) -> None:
        """`arena`: uint8 on the device. `lora` is told what is complete."""
        self._device = device
        self._arena = arena
        self._extent_bytes = extent_bytes
        self._lora = lora
        self._copies: dict[int, _Copy] = {}  # oldest first
        self._resident: dict[int, _Resident] = {}
        self._abandoned: list[_Copy] = []  # dropped while the device still reads their blobs

    def start(self, slot: int, first_extent: int, blob: AdapterBlob) -> None:
        """Puts a copy onto its stream. Raises ValueError for a taken slot or an arena too small."""
        first_byte = first_extent * self._extent_bytes
        if slot in self._copies or slot in self._resident:
            raise ValueError(f"adapter slot {slot} is taken")
        self._check(first_byte, blob.layout.nbytes)
        self._device.wait("copies", self._device.record("steps"))
        place = self._arena[first_byte : first_byte + blob.layout.nbytes]
        self._device.copy("copies", place, torch.from_numpy(blob.data[: blob.layout.nbytes]))
        self._copies[slot] = _Copy(blob, first_byte, self._device.record("copies"))

    def poll(self) -> list[int]:
        """The slots that became usable, oldest first."""
        self._abandoned = [copy for copy in self._abandoned if not copy.arrived.done()]
        complete = []
        for slot, copy in list(self._copies.items()):
            if not copy.arrived.done():
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
            self._device.wait("steps", copy.arrived)
            self._move_bytes(copy.first_byte, first_byte, copy.blob.layout.nbytes)
            copy.first_byte, copy.arrived = first_byte, self._device.record("steps")
        elif resident is not None:
            self._move_bytes(resident.first_byte, first_byte, resident.layout.nbytes)
            self._activate(slot, resident.layout, first_byte)
        else:
            raise ValueError(f"adapter slot {slot} holds nothing to move")

    def drop(self, slot: int) -> None:
        """Forgets a slot; nothing happens when it holds nothing.

        Steps and copies that are put on from now on may use its bytes: they come after it.
        """
        copy = self._copies.pop(slot, None)
        if copy is not None:
            self._device.wait("steps", copy.arrived)
            self._abandoned.append(copy)
        if self._resident.pop(slot, None) is not None:
            with self._device.on("steps"):
                self._lora.drop(slot)

    def _activate(self, slot: int, layout: AdapterLayout, first_byte: int) -> None:
        with self._device.on("steps"):
            self._lora.activate(slot, layout, first_byte)
        self._resident[slot] = _Resident(layout, first_byte)

    def _move_bytes(self, source: int, destination: int, nbytes: int) -> None:
        self._check(destination, nbytes)
        for start, stop in pieces(source, destination, nbytes):
            self._device.copy(
                "steps",
                self._arena[destination + start : destination + stop],
                self._arena[source + start : source + stop],
            )

    def _check(self, first_byte: int, nbytes: int) -> None:
        if not 0 <= first_byte <= self._arena.numel() - nbytes:
            raise ValueError(f"an adapter of {nbytes} bytes does not fit at byte {first_byte}")


def pieces(source: int, destination: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Parts (start, stop) of a move, in the order in which none overwrites what is still needed.

    No part is longer than the way it goes, so its own two ranges do not overlap.
    """
    way = abs(destination - source)
    if not way:
        return
    starts = range(0, nbytes, way)
    for start in starts if destination < source else reversed(starts):
        yield start, min(start + way, nbytes)
