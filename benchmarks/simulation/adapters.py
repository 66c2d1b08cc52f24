"""The store on the simulated clock: a Loader without threads whose reads take their time."""

import heapq
import math
from dataclasses import dataclass

import numpy as np

from engine.adapters.loading import Loaded, LoadEvent, LoadFailed, Measured
from engine.clock import SimulatedClock
from engine.types import AdapterBlob, AdapterLayout, AdapterModule, AdapterRef


@dataclass(frozen=True, slots=True)
class StoreSpeed:
    """Milliseconds until the first byte, and bytes per ms of each phase (verify; parse)."""

    open_ms: float = 0.5
    verify_bytes_per_ms: float = 1.5e9 / 1e3  # sha256 of one thread
    build_bytes_per_ms: float = 3.0e9 / 1e3


HOST_RESIDENT = StoreSpeed(0.0, math.inf, math.inf)
"""Everything is in host memory already: only the bus is left."""


class SimulatedLoader:
    """Adapters of known ranks; the blobs take no memory here whatever they say they weigh."""

    def __init__(
        self, clock: SimulatedClock, ranks: dict[AdapterRef, int], rank_bytes: int,
        speed: StoreSpeed = HOST_RESIDENT,
    ) -> None:  # fmt: skip
        self._clock = clock
        self._ranks = ranks
        self._rank_bytes = rank_bytes
        self._speed = speed
        self._due: list[tuple[float, int, LoadEvent]] = []
        self._count = 0
        self.loads = 0

    def measure(self, ref: AdapterRef) -> None:
        rank = self._ranks.get(ref)
        if rank is None:
            missing = LoadFailed(ref, "adapter_missing", "No such adapter.", transient=True)
            self._later(self._speed.open_ms, missing)
            return
        nbytes = rank * self._rank_bytes
        took_ms = self._speed.open_ms + nbytes / self._speed.verify_bytes_per_ms
        self._later(took_ms, Measured(ref, nbytes, rank))

    def build(self, ref: AdapterRef) -> None:
        self.loads += 1
        nbytes = self._ranks[ref] * self._rank_bytes
        self._later(nbytes / self._speed.build_bytes_per_ms, Loaded(ref, self._blob(ref)))

    def abandon(self, ref: AdapterRef) -> None:
        """Nothing was planned that would have to be forgotten."""

    def poll(self) -> list[LoadEvent]:
        events = []
        while self._due and self._due[0][0] <= self._clock.now_ms():
            events.append(heapq.heappop(self._due)[2])
        return events

    def close(self) -> None:
        self._due.clear()

    @property
    def next_ms(self) -> float:
        """When the next read will be over; infinity when none is under way."""
        return self._due[0][0] if self._due else math.inf

    def _blob(self, ref: AdapterRef) -> AdapterBlob:
        rank = self._ranks[ref]
        nbytes = rank * self._rank_bytes
        modules = (AdapterModule(0, rank, 1.0, 0, nbytes // 2),)
        data = np.broadcast_to(np.zeros(1, dtype=np.uint8), (nbytes,))
        return AdapterBlob(AdapterLayout(modules, "bf16", rank, nbytes), data)

    def _later(self, delay_ms: float, event: LoadEvent) -> None:
        self._count += 1
        heapq.heappush(self._due, (self._clock.now_ms() + delay_ms, self._count, event))
