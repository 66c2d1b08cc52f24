"""Adapters on their way from the store to host memory.

    queued ──> measuring ──> measured ──> building ──> host
       (max_loads at once)     (host bytes)

One load for all that wait, by the policy's turns. Its size is known before its bytes are read, so
that host memory is set aside first.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping

from engine.adapters.entry import Entry, Stage
from engine.adapters.failures import Failed, over_limit
from engine.adapters.host_cache import HostCache
from engine.adapters.loading import Loaded, Loader, LoadEvent, Measured
from engine.adapters.resident_bytes import ResidentPromises
from engine.config import EngineConfig
from engine.load_time import LoadTimes
from engine.policy import Policy
from engine.types import AdapterRef
from engine.waiting import FairQueue


class Loads:
    """`largest_bytes`, `max_rank`: what the engine can hold at all. `on_gone(entry)`: nobody waits
    for an adapter that is nowhere any more."""

    def __init__(
        self,
        config: EngineConfig,
        loader: Loader,
        host: HostCache,
        entries: Mapping[AdapterRef, Entry],
        promises: ResidentPromises,
        policy: Policy,
        times: LoadTimes,
        *,
        largest_bytes: int,
        max_rank: int,
        on_gone: Callable[[Entry], None],
    ) -> None:
        self._config = config
        self._loader = loader
        self._host = host
        self._entries = entries
        self._promises = promises
        self._hurries = policy.keeps_budgets
        self._times = times
        self._largest_bytes = largest_bytes
        self._max_rank = max_rank
        self._on_gone = on_gone
        self._queue: FairQueue[Entry] = FairQueue(policy)
        self._measured: deque[Entry] = deque()
        self._under_way = 0  # measuring or building, those of erased adapters too
        self._erasing: set[AdapterRef] = set()  # loads whose result will be thrown away

    @property
    def busy(self) -> bool:
        """Whether anything is read, or waits to be."""
        return bool(self._under_way or self._queue or self._measured)

    def expected_ms(self, nbytes: int) -> float:
        """How long a load that is asked for now takes, behind those that are here; 0 bytes: not
        known yet."""
        queued = (len(self._queue) + self._under_way) / self._config.max_loads
        return (1.0 + queued) * self._times.predict_ms("store", nbytes)

    def begin(self, entry: Entry, now_ms: float) -> None:
        """The adapter is to be loaded, for the longest waiting of its requests."""
        entry.stage = Stage.QUEUED
        entry.stand_for_oldest(now_ms)
        self._queue.push(entry)

    def withdraw(self, entry: Entry) -> None:
        """Nobody wants the adapter any more. What a reader is at goes on to its end."""
        if entry.stage is Stage.QUEUED:
            self._queue.remove(entry)
        elif entry.stage is Stage.MEASURED:
            self._measured.remove(entry)
            self._loader.abandon(entry.ref)

    # ------------------------------------------------------------------ the step

    def poll(self, now_ms: float) -> Iterator[Entry | Failed]:
        """What has come to host memory, and what failed; each to be dealt with before the next."""
        for event in self._loader.poll():
            self._under_way -= 1
            if event.ref in self._erasing:
                self._throw_away(event)
            elif (outcome := self._take_in(event, now_ms)) is not None:
                yield outcome

    def start(self, now_ms: float) -> list[Failed]:
        """Begins what can be begun: blobs that there is host memory for, then further loads.

        Those that a limit lowered meanwhile has made too large are returned.
        """
        failed = []
        for _ in range(len(self._measured)):
            entry = self._measured.popleft()
            misfit = self._misfit(entry)
            if misfit is not None:
                failed.append(misfit)
                self._measured.append(entry)
            elif self._make_room(entry, now_ms):
                entry.stage = Stage.BUILDING
                self._under_way += 1
                self._loader.build(entry.ref)
            else:
                self._measured.append(entry)
        while self._under_way < self._config.max_loads:
            following = self._queue.next(now_ms, hurries=self._hurries)
            if following is None:
                break
            self._queue.remove(following)
            following.stage = Stage.MEASURING
            following.since_ms = now_ms
            self._under_way += 1
            self._loader.measure(following.ref)
        return failed

    def _make_room(self, entry: Entry, now_ms: float) -> bool:
        """Sets host memory aside for a measured adapter, if others' copies there can go."""
        overdue = now_ms - entry.since_ms > self._config.adapter_aging_ms
        dropped = self._host.reserve(entry.ref, entry.nbytes, self._can_go, overdue=overdue)
        if dropped is None:
            return False
        for ref in dropped:
            gone = self._entries[ref]
            if gone.stage is Stage.HOST:
                self._on_gone(gone)
        return True

    def _can_go(self, ref: AdapterRef) -> bool:
        """Whether a copy in host memory is not needed: it is on the device, or nobody waits."""
        entry = self._entries[ref]
        return entry.stage is Stage.DEVICE or (entry.stage is Stage.HOST and not entry.waiting)

    # ------------------------------------------------------------------ what readers say

    def _take_in(self, event: LoadEvent, now_ms: float) -> Entry | Failed | None:
        entry = self._entries[event.ref]
        if isinstance(event, Measured):
            return self._on_measured(entry, event)
        if isinstance(event, Loaded):
            return self._on_loaded(entry, event, now_ms)
        config = self._config
        retry_ms = config.missing_retry_ms if event.transient else config.quarantine_ms
        return Failed(entry, event.code, event.message, retry_ms)

    def _on_measured(self, entry: Entry, event: Measured) -> Failed | None:
        entry.nbytes, entry.max_rank = event.nbytes, event.max_rank
        failed = self._misfit(entry)
        if failed is not None or not entry.waiting:
            self._loader.abandon(entry.ref)
            if failed is None:
                self._on_gone(entry)
            return failed
        entry.stage = Stage.MEASURED
        self._measured.append(entry)
        return None

    def _misfit(self, entry: Entry) -> Failed | None:
        """Why a measured adapter can never be held."""
        retry_ms, largest = self._config.quarantine_ms, self._largest_bytes
        if entry.nbytes > largest:
            code = "adapter_too_large"
            reason = f"of {entry.nbytes} bytes; the limit is {largest} bytes"
        elif entry.max_rank > self._max_rank:
            code, reason = "rank_out_of_range", f"rank {entry.max_rank}; most is {self._max_rank}"
        elif self._promises.too_large(entry.ref.salt, entry.nbytes):
            return over_limit(entry, self._promises.of(entry.ref.salt).most or 0, retry_ms)
        else:
            return None
        return Failed(entry, code, f"This engine cannot hold the adapter: {reason}.", retry_ms)

    def _on_loaded(self, entry: Entry, event: Loaded, now_ms: float) -> Entry | Failed:
        try:
            self._host.fill(event.ref, event.blob)
        except ValueError as error:
            message = f"The adapter could not be loaded: {error}."
            return Failed(entry, "adapter_load_failed", message, self._config.quarantine_ms)
        entry.stage = Stage.HOST
        self._times.observe("store", entry.nbytes, now_ms - entry.since_ms)
        return entry

    # ------------------------------------------------------------------ erasure

    def erase(self, entry: Entry) -> None:
        """Nothing of the adapter stays in host memory; what a reader is at will be thrown away."""
        if entry.stage in (Stage.MEASURING, Stage.BUILDING):
            self._erasing.add(entry.ref)
        if entry.stage is not Stage.BUILDING:  # its memory is written to
            self._host.drop(entry.ref)

    def erasing(self, ref: AdapterRef) -> bool:
        """Whether a reader is still at an erased adapter."""
        return ref in self._erasing

    def _throw_away(self, event: LoadEvent) -> None:
        self._erasing.discard(event.ref)
        if isinstance(event, Measured):
            self._loader.abandon(event.ref)
        else:
            self._host.drop(event.ref)
