"""One adapter that the engine knows: how far it has come, and who waits for it."""

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum

from engine.request import Sequence
from engine.types import AdapterRef


class Stage(Enum):
    QUEUED = "queued"  # to be read as soon as a loader is free
    MEASURING = "measuring"
    MEASURED = "measured"  # waits for host memory
    BUILDING = "building"
    HOST = "host"
    COPYING = "copying"
    DEVICE = "device"

    @property
    def on_device(self) -> bool:
        """Whether it holds a place on the device, complete or not."""
        return self in (Stage.COPYING, Stage.DEVICE)


@dataclass(slots=True, eq=False)
class Entry:
    """One adapter. While it waits for the device it is a waiter itself, on behalf of its first."""

    ref: AdapterRef
    stage: Stage = Stage.QUEUED
    nbytes: int = 0
    max_rank: int = 0
    waiting: OrderedDict[tuple[int, int], Sequence] = field(default_factory=OrderedDict)
    order: tuple[int, int] = (0, 0)
    tenant: str = ""
    arrival_ms: float = 0.0  # when it came to wait for the device
    turn_ms: float = 0.0
    urgent_ms: float = math.inf
    lost_ms: float = math.inf
    since_ms: float = 0.0  # when the stage began that is timed

    @property
    def oldest(self) -> Sequence | None:
        return next(iter(self.waiting.values()), None)

    def join(self, sequence: Sequence) -> None:
        """The sequence waits for it, in its place by arrival."""
        first = self.oldest
        self.waiting[sequence.order] = sequence
        if first is not None and sequence.order < first.order:
            self.waiting.move_to_end(sequence.order, last=False)

    def stand_for_oldest(self, now_ms: float) -> None:
        """It takes the place of the longest waiting of its requests."""
        first = self.oldest
        if first is None:
            raise AssertionError("an adapter that nobody waits for is not wanted")
        self.order, self.tenant, self.arrival_ms = first.order, first.tenant, now_ms
        self.turn_ms, self.urgent_ms, self.lost_ms = first.turn_ms, first.urgent_ms, first.lost_ms

    def give_up_hurry(self) -> None:
        if self.oldest is not None:
            self.oldest.give_up_hurry()
            self.turn_ms = self.oldest.turn_ms
        self.urgent_ms = self.lost_ms = math.inf


def ref_of(sequence: Sequence) -> AdapterRef:
    """The adapter of a sequence that asks for one."""
    ref = sequence.call.request.adapter
    if ref is None:
        raise AssertionError("a request of the base model has no place in the adapter pool")
    return ref
