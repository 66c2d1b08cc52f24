"""The adapter pool: what is on its way, in host memory, on the device; who waits for it.

    wanted ──> queued ──> measuring ──> measured ──> building ──> host ──> copying ──> device
              (max_loads at once)    (host bytes)               (slot, span)

Keys are (tenant salt, digest): nobody learns from a load time what another tenant uploaded. All
budgets are bytes (or extents of the arena). Nothing here waits: `advance` moves everything on by
what has happened since, and says whose adapter became usable and whose failed.
"""

import logging
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from engine.adapters.copy_pace import CopyPace
from engine.adapters.device_space import DeviceSpace
from engine.adapters.host_cache import HostCache
from engine.adapters.loading import Loaded, Loader, LoadFailed, Measured
from engine.adapters.quarantine import Quarantine, Quarantined
from engine.arena import Arena
from engine.clock import Clock
from engine.config import EngineConfig
from engine.errors import AdapterRefused
from engine.kv_blocks import KvBlocks
from engine.load_time import LoadTimes
from engine.policy import Policy, load_cost
from engine.request import Sequence
from engine.types import AdapterBlob, AdapterRef, Executor, Residency
from engine.waiting import FairQueue

PLACEMENTS_PER_STEP = 16
"""Adapters for which room is sought in one step."""
RESIDENCY_COPIES = 4.0
"""An adapter that took another's place by age keeps the next from doing so for as many times as
long as its copy takes: at most a fifth of the time goes into changing places."""
PLACE_MEMORY = 0.1
RESIDENCY_MS = 1000.0
"""How long an adapter in use keeps the place that another has waited for too long. Its requests are
then set aside; what they had computed is still there as cached prefix when they come back."""
RECOMPUTED_RESIDENCY_MS = 10_000.0
"""The same where no prefix is cached: being set aside then costs all that was computed."""
ERASED_MS = 5_000.0
"""How long an erased adapter is refused: calls that were on their way must not bring it back."""

log = logging.getLogger(__name__)


class Stage(Enum):
    QUEUED = "queued"  # to be read as soon as a loader is free
    MEASURING = "measuring"
    MEASURED = "measured"  # waits for host memory
    BUILDING = "building"
    HOST = "host"
    COPYING = "copying"
    DEVICE = "device"


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

    def give_up_hurry(self) -> None:
        if self.oldest is not None:
            self.oldest.give_up_hurry()
            self.turn_ms = self.oldest.turn_ms
        self.urgent_ms = self.lost_ms = math.inf

    @property
    def oldest(self) -> Sequence | None:
        return next(iter(self.waiting.values()), None)


@dataclass(slots=True)
class PoolEvents:
    """What `advance` brought about."""

    usable: list[Sequence] = field(default_factory=list)
    failed: list[tuple[Sequence, str, str]] = field(default_factory=list)  # code, message


class AdapterPool:
    def __init__(
        self,
        config: EngineConfig,
        arena: Arena,
        blocks: KvBlocks,
        executor: Executor,
        loader: Loader,
        policy: Policy,
        clock: Clock | None = None,
    ) -> None:
        """`clock`: times how long copies hold up the step loop; without one that is nothing."""
        self._config = config
        self._executor = executor
        self._loader = loader
        self._policy = policy
        self._clock = clock
        self.pace = CopyPace(config.copy_bytes_per_step)
        self._blocks = blocks
        self._extent_bytes = executor.description.kv_block_bytes
        self._max_rank = min(config.max_rank, executor.description.max_rank)
        self._host = HostCache(config.host_cache_bytes)
        self._entries: dict[AdapterRef, Entry] = {}
        self._load_queue: FairQueue[Entry] = FairQueue(policy)
        self._measured: deque[Entry] = deque()
        self._loads = 0  # measuring or building, those of erased adapters too
        self._erasing: set[AdapterRef] = set()  # loads whose result will be thrown away
        self._wanted: FairQueue[Entry] = FairQueue(policy)
        self._quarantine = Quarantine()
        self._spared: list[AdapterRef] = []  # were to leave the device and need not any more
        self._now_ms = 0.0
        self.load_times = LoadTimes()
        self.evictions = 0
        self._place_wait_ms = 0.0  # that adapters had lately, from host memory to a place
        self._no_hold_before_ms = -math.inf
        self.loads = 0
        self._device = DeviceSpace(
            arena,
            blocks,
            executor,
            max_slots=config.max_slots,
            max_extents=int(arena.extents * config.adapter_share),
            order_of=self._order_of,
            on_evicted=self._evicted,
            on_spared=self._spared.append,
        )

    # ------------------------------------------------------------------ requests

    def enqueue(self, sequence: Sequence, now_ms: float) -> bool:
        """The sequence waits for its adapter, whose load begins now; whether it is usable already.

        Raises AdapterRefused while the adapter is in quarantine or being erased.
        """
        request = sequence.call.request
        ref = _ref_of(sequence)
        if request.system and ref not in self._erasing:
            self._quarantine.lift(ref)  # validation asks for a fresh verdict
        refusal = self._quarantine.get(ref, now_ms)
        if refusal is not None:
            raise AdapterRefused(refusal.message, code=refusal.code)
        self.wait(sequence, now_ms)
        return self.usable(ref)

    def wait(self, sequence: Sequence, now_ms: float) -> None:
        """The sequence waits, in its place by arrival."""
        ref = _ref_of(sequence)
        entry = self._entries.get(ref)
        known = entry is not None
        if entry is None:
            entry = self._entries[ref] = Entry(ref)
        first = entry.oldest
        entry.waiting[sequence.order] = sequence
        if first is not None and sequence.order < first.order:
            entry.waiting.move_to_end(sequence.order, last=False)
        if not known:
            self._stand_for_oldest(entry, now_ms)
            self._load_queue.push(entry)
        if entry.stage is Stage.HOST and first is None:
            self._want(entry, now_ms)

    def leave(self, sequence: Sequence) -> None:
        """The sequence no longer waits for its adapter."""
        entry = self._entries.get(_ref_of(sequence))
        if entry is None or entry.waiting.pop(sequence.order, None) is None or entry.waiting:
            return
        if self._wanted.remove(entry) and self._holding(entry):
            self._device.release_hold()
        if entry.stage is Stage.MEASURED:
            self._loader.abandon(entry.ref)
        if entry.stage in (Stage.QUEUED, Stage.MEASURED):
            self._remove(entry)

    def usable(self, ref: AdapterRef) -> bool:
        """Whether a further request may pin the adapter now."""
        resident = self._device.get(ref)
        return resident is not None and resident.copied and not resident.draining

    def pin(self, sequence: Sequence) -> int:
        """The adapter's slot for a sequence that starts to run."""
        ref = _ref_of(sequence)
        self._entries[ref].waiting.pop(sequence.order, None)
        return self._device.pin(ref)

    def unpin(self, ref: AdapterRef) -> None:
        self._device.unpin(ref)

    def nbytes(self, ref: AdapterRef) -> int:
        return self._entries[ref].nbytes

    def rank(self, ref: AdapterRef) -> int:
        return self._entries[ref].max_rank

    def expected_ms(self, ref: AdapterRef, now_ms: float) -> float:
        """How long until the adapter is usable, if loads take as long as they did; 0: it is."""
        if self.usable(ref):
            return 0.0
        times, entry = self.load_times, self._entries.get(ref)
        nbytes = 0 if entry is None else entry.nbytes
        copy_ms = (1 + len(self._wanted)) * times.predict_ms("host", nbytes)
        if self._wanted:
            copy_ms += self._place_wait_ms
        if entry is not None and entry.stage in (Stage.HOST, Stage.COPYING):
            return copy_ms
        queued = (len(self._load_queue) + self._loads) / self._config.max_loads
        return (1.0 + queued) * times.predict_ms("store", nbytes) + copy_ms

    def reclaim(self, blocks: int, *, force: bool = False, keep: AdapterRef | None = None) -> bool:
        """Lets idle adapters give way until `blocks` KV blocks are available; whether they are."""
        return self._device.reclaim(blocks, force=force, keep=keep)

    # ------------------------------------------------------------------ the step

    @property
    def busy(self) -> bool:
        """Whether loads or copies are under way or to be started."""
        return bool(
            self._loads
            or self._load_queue
            or self._measured
            or self._wanted
            or self._spared
            or self._device.copying()
        )

    def advance(
        self, now_ms: float, needed_blocks: Callable[[], int], copy_bytes: int
    ) -> PoolEvents:
        """Takes in what loaders and copies have finished and starts what can be started.

        `needed_blocks()`: KV blocks that running sequences cannot do without.
        """
        self._now_ms = now_ms
        events = PoolEvents()
        for event in self._loader.poll():
            if isinstance(event, Measured):
                self._on_measured(event, now_ms, events)
            elif isinstance(event, Loaded):
                self._on_loaded(event, now_ms, events)
            else:
                self._on_failed(event, now_ms, events)
        self._start_loads()
        if self._wanted:
            self._place_wanted(now_ms, needed_blocks(), events)
        for slot in self._poll_copies(copy_bytes):
            entry = self._entries[self._device.copied(slot).ref]
            entry.stage = Stage.DEVICE
            self.load_times.observe("host", entry.nbytes, now_ms - entry.since_ms)
            events.usable.extend(entry.waiting.values())
        while self._spared:
            spared = self._entries.get(self._spared.pop())
            if spared is not None and self.usable(spared.ref):
                events.usable.extend(spared.waiting.values())
        return events

    def _poll_copies(self, copy_bytes: int) -> list[int]:
        """Moves copies on; the slots that are complete."""
        if self._clock is None:
            return self._executor.poll_copies(copy_bytes)
        began_ms = self._clock.now_ms()
        complete = self._executor.poll_copies(copy_bytes)
        self.pace.moved(copy_bytes, self._clock.now_ms() - began_ms)
        return complete

    def _start_loads(self) -> None:
        for _ in range(len(self._measured)):
            entry = self._measured.popleft()
            dropped = self._host.reserve(entry.ref, entry.nbytes, self._host_copy_can_go)
            if dropped is None:
                self._measured.append(entry)
                continue
            for ref in dropped:
                self._host_copy_gone(ref)
            entry.stage = Stage.BUILDING
            self._loads += 1
            self._loader.build(entry.ref)
        while self._loads < self._config.max_loads:
            following = self._next_of(self._load_queue, self._now_ms)
            if following is None:
                break
            self._load_queue.remove(following)
            following.stage = Stage.MEASURING
            following.since_ms = self._now_ms
            self._loads += 1
            self._loader.measure(following.ref)

    def _on_measured(self, event: Measured, now_ms: float, events: PoolEvents) -> None:
        self._loads -= 1
        if event.ref in self._erasing:
            self._loader.abandon(event.ref)
            self._erasing.discard(event.ref)
            return
        entry = self._entries[event.ref]
        entry.nbytes, entry.max_rank = event.nbytes, event.max_rank
        limit = min(self._config.host_cache_bytes, self._device.max_extents * self._extent_bytes)
        refusal = None
        if event.nbytes > limit:
            refusal = ("adapter_too_large", f"of {event.nbytes} bytes; the limit is {limit} bytes")
        elif event.max_rank > self._max_rank:
            refusal = ("rank_out_of_range", f"rank {event.max_rank}; most is {self._max_rank}")
        if refusal is not None:
            self._loader.abandon(event.ref)
            message = f"This engine cannot hold the adapter: {refusal[1]}."
            self._fail(entry, refusal[0], message, now_ms, self._config.quarantine_ms, events)
        elif not entry.waiting:
            self._loader.abandon(event.ref)
            self._remove(entry)
        else:
            entry.stage = Stage.MEASURED
            self._measured.append(entry)

    def _on_loaded(self, event: Loaded, now_ms: float, events: PoolEvents) -> None:
        self._loads -= 1
        if event.ref in self._erasing:
            self._erasing.discard(event.ref)
            self._host.drop(event.ref)
            return
        entry = self._entries[event.ref]
        try:
            self._host.fill(event.ref, event.blob)
        except ValueError as error:
            message = f"The adapter could not be loaded: {error}."
            retry_ms = self._config.quarantine_ms
            self._fail(entry, "adapter_load_failed", message, now_ms, retry_ms, events)
            return
        entry.stage = Stage.HOST
        self.load_times.observe("store", entry.nbytes, now_ms - entry.since_ms)
        self.loads += 1
        if entry.waiting:
            self._charge_load(entry)
            self._want(entry, now_ms)

    def _on_failed(self, event: LoadFailed, now_ms: float, events: PoolEvents) -> None:
        self._loads -= 1
        if event.ref in self._erasing:
            self._erasing.discard(event.ref)
            self._host.drop(event.ref)
            return
        config = self._config
        retry_ms = config.missing_retry_ms if event.transient else config.quarantine_ms
        entry = self._entries[event.ref]
        self._fail(entry, event.code, event.message, now_ms, retry_ms, events)

    def _fail(
        self,
        entry: Entry,
        code: str,
        message: str,
        now_ms: float,
        retry_ms: float,
        events: PoolEvents,
    ) -> None:
        """The adapter cannot be had: its requests end, others of its key are refused a while."""
        self._host.drop(entry.ref)
        self._remove(entry)
        self._quarantine.put(entry.ref, Quarantined(code, message, now_ms + retry_ms), now_ms)
        events.failed.extend((sequence, code, message) for sequence in entry.waiting.values())

    def _charge_load(self, entry: Entry) -> None:
        first = entry.oldest
        if first is not None:
            self._policy.charge(first.tenant, first.call.weight, load_cost(entry.nbytes))

    # ------------------------------------------------------------------ onto the device

    def _want(self, entry: Entry, now_ms: float) -> None:
        self._stand_for_oldest(entry, now_ms)
        self._wanted.push(entry)

    def _stand_for_oldest(self, entry: Entry, now_ms: float) -> None:
        """The adapter takes the place of the longest waiting of its requests."""
        first = entry.oldest
        if first is None:
            raise AssertionError("an adapter that nobody waits for is not wanted")
        entry.order, entry.tenant, entry.arrival_ms = first.order, first.tenant, now_ms
        entry.turn_ms, entry.urgent_ms, entry.lost_ms = (
            first.turn_ms,
            first.urgent_ms,
            first.lost_ms,
        )

    def _place_wanted(self, now_ms: float, needed_blocks: int, events: PoolEvents) -> None:
        self._relieve_starving(now_ms, events)
        refused = []
        most = self._device.most_extents(needed_blocks)
        for _ in range(PLACEMENTS_PER_STEP):
            entry = self._next_of(self._wanted, now_ms) if most else None
            if entry is None:
                break
            self._wanted.remove(entry)
            extents = self._extents(entry)
            resident = None
            if extents <= most and not self._holding(entry):
                resident = self._device.place(entry.ref, extents, needed_blocks)
            if resident is None:
                refused.append(entry)
            else:
                self._start_copy(entry, resident.slot, now_ms, events)
                most = self._device.most_extents(needed_blocks)
        for entry in refused:
            self._wanted.push(entry)

    def _next_of(self, queue: FairQueue[Entry], now_ms: float) -> Entry | None:
        """Whose turn it is to be loaded, or to come onto the device."""
        if self._policy.keeps_budgets and (urgent := queue.urgent(now_ms)) is not None:
            return urgent
        return queue.peek()

    def _relieve_starving(self, now_ms: float, events: PoolEvents) -> None:
        """Gives the adapter that has waited too long the place of those resident longest."""
        oldest = self._wanted.oldest()
        if self._device.hold is None and oldest is not None:
            if now_ms - oldest.arrival_ms <= self._config.adapter_aging_ms:
                return
            if now_ms < self._no_hold_before_ms:
                return
            self._device.begin_hold(oldest.ref, self._extents(oldest))
        resident = self._device.fill_hold()
        if resident is not None:
            copy_ms = self.load_times.predict_ms("host", self._entries[resident.ref].nbytes)
            self._no_hold_before_ms = now_ms + RESIDENCY_COPIES * copy_ms
            entry = self._entries[resident.ref]
            self._wanted.remove(entry)
            self._start_copy(entry, resident.slot, now_ms, events)

    def overdue(self, now_ms: float) -> list[AdapterRef]:
        """Adapters in use that have not left a held place in time: their requests must stop.

        Without this the wait for a place would be as long as the longest answer.
        """
        hold = self._device.hold
        if hold is None:
            return []
        cached = self._config.prefix_caching
        keeps_ms = RESIDENCY_MS if cached else RECOMPUTED_RESIDENCY_MS
        return [v.ref for v in hold.victims if v.pins and now_ms - v.since_ms >= keeps_ms]

    def _start_copy(self, entry: Entry, slot: int, now_ms: float, events: PoolEvents) -> None:
        blob = self._blob(entry)
        resident = self._device.get(entry.ref)
        if resident is None:
            raise AssertionError("an adapter is copied to the place it was given")
        try:
            self._executor.start_copy(slot, self._device.span_of(resident).first, blob)
        except Exception:
            log.exception("an adapter could not be copied to the device")
            self._device.drop(entry.ref)
            message = "The adapter could not be copied to the device."
            retry_ms = self._config.quarantine_ms
            self._fail(entry, "adapter_copy_failed", message, now_ms, retry_ms, events)
            return
        entry.stage = Stage.COPYING
        resident.since_ms = now_ms
        self.pace.started(slot, entry.nbytes)
        self._place_wait_ms += PLACE_MEMORY * (now_ms - entry.arrival_ms - self._place_wait_ms)
        entry.since_ms = now_ms

    def _blob(self, entry: Entry) -> AdapterBlob:
        blob = self._host.get(entry.ref)
        if blob is None:
            raise AssertionError("an adapter is copied from host memory")
        return blob

    def _extents(self, entry: Entry) -> int:
        """Extents that the adapter takes on the device; its size must be known."""
        return -(-entry.nbytes // self._extent_bytes)

    def _holding(self, entry: Entry) -> bool:
        return self._device.hold is not None and self._device.hold.ref == entry.ref

    def _evicted(self, ref: AdapterRef) -> None:
        """The adapter left the device; whoever still waits for it makes it come back."""
        self.evictions += 1
        entry = self._entries[ref]
        if ref in self._host:
            entry.stage = Stage.HOST
            if entry.waiting:
                self._want(entry, self._now_ms)
        elif entry.waiting:
            entry.stage = Stage.QUEUED
            self._stand_for_oldest(entry, self._now_ms)
            self._load_queue.push(entry)
        else:
            self._remove(entry)

    # ------------------------------------------------------------------ host memory

    def _host_copy_can_go(self, ref: AdapterRef) -> bool:
        entry = self._entries[ref]
        return entry.stage is Stage.DEVICE or (entry.stage is Stage.HOST and not entry.waiting)

    def _host_copy_gone(self, ref: AdapterRef) -> None:
        entry = self._entries[ref]
        if entry.stage is Stage.HOST:
            self._remove(entry)

    def _remove(self, entry: Entry) -> None:
        self._wanted.remove(entry)
        if entry.stage is Stage.QUEUED:
            self._load_queue.remove(entry)
        elif entry.stage is Stage.MEASURED:
            self._measured.remove(entry)
        del self._entries[entry.ref]

    def _order_of(self, ref: AdapterRef) -> tuple[int, int] | None:
        first = self._entries[ref].oldest
        return None if first is None else first.order

    # ------------------------------------------------------------------ erasure and status

    def forget(self, ref: AdapterRef, now_ms: float) -> bool:
        """Drops the adapter from every tier and from the prefix cache; whether all of it is gone.

        Nobody may wait for it or pin it. False while a load is under way: its result will be
        thrown away, ask again. For a while further requests are refused.
        """
        message = "The adapter was deleted."
        refusal = Quarantined("adapter_deleted", message, now_ms + ERASED_MS)
        self._quarantine.put(ref, refusal, now_ms)
        self._blocks.drop_owner(ref)
        entry = self._entries.get(ref)
        if entry is not None:
            if entry.stage in (Stage.MEASURING, Stage.BUILDING):
                self._erasing.add(ref)
            elif entry.stage is Stage.MEASURED:
                self._loader.abandon(ref)
            if (resident := self._device.get(ref)) is not None:
                self.pace.dropped(resident.slot)
                self._device.drop(ref)
            if entry.stage is not Stage.BUILDING:
                self._host.drop(ref)
            self._remove(entry)
        return ref not in self._erasing

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory held, those of blobs being built included."""
        return self._host.used_bytes

    def device_bytes(self) -> int:
        """True bytes of the adapters on the device (spans are rounded up to extents)."""
        on_device = (Stage.COPYING, Stage.DEVICE)
        return sum(entry.nbytes for entry in self._entries.values() if entry.stage in on_device)

    def residency(self, now_ms: float) -> list[Residency]:
        """Every adapter that the engine knows something of."""
        found = []
        for entry in self._entries.values():
            resident = self._device.get(entry.ref)
            pins = 0 if resident is None else resident.pins
            if entry.stage is Stage.DEVICE:
                found.append(Residency(entry.ref, "device", entry.nbytes, pins))
            elif entry.stage is Stage.HOST:
                found.append(Residency(entry.ref, "host", entry.nbytes, pins))
            else:
                found.append(Residency(entry.ref, "loading", entry.nbytes, pins))
        found.extend(
            Residency(ref, "quarantined", 0, 0) for ref, _ in self._quarantine.active(now_ms)
        )
        return found


def _ref_of(sequence: Sequence) -> AdapterRef:
    ref = sequence.call.request.adapter
    if ref is None:
        raise AssertionError("a request of the base model has no place in the adapter pool")
    return ref
