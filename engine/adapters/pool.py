"""The adapter pool: what is on its way, in host memory, on the device; who waits for it.

    wanted ──> queued ──> measuring ──> measured ──> building ──> host ──> copying ──> device
              (max_loads at once)    (host bytes)               (slot, span)

Keys are (tenant salt, digest): nobody learns from a load time what another tenant uploaded. All
budgets are bytes (or extents of the arena). Nothing here waits: `advance` moves everything on by
what has happened since, and says whose adapter became usable and whose failed.
"""

import logging
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from engine.adapters.copy_pace import CopyPace
from engine.adapters.device_space import DeviceSpace
from engine.adapters.host_cache import HostCache
from engine.adapters.loading import Loaded, Loader, LoadFailed, Measured
from engine.adapters.quarantine import Quarantine, Quarantined
from engine.adapters.resident_bytes import ResidentPromises, TierBytes
from engine.arena import Arena
from engine.clock import Clock
from engine.config import EngineConfig
from engine.errors import AdapterRefused
from engine.kv_blocks import KvBlocks
from engine.load_time import LoadTimes
from engine.policy import Policy, load_cost
from engine.request import Sequence
from engine.types import AdapterBlob, AdapterRef, Executor, Residency, TenantResidency
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

TOO_LARGE_FOR_TENANT = "adapter_exceeds_resident_bytes"

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
        self._promises = ResidentPromises()
        max_extents = int(arena.extents * config.adapter_share)
        self._device_bytes = max_extents * self._extent_bytes
        host_bytes = config.host_cache_bytes
        self._host = HostCache(host_bytes, TierBytes(host_bytes, self._promises))
        self._entries: dict[AdapterRef, Entry] = {}
        self._load_queue: FairQueue[Entry] = FairQueue(policy)
        self._measured: deque[Entry] = deque()
        self._loads = 0  # measuring or building, those of erased adapters too
        self._erasing: set[AdapterRef] = set()  # loads whose result will be thrown away
        self._wanted: FairQueue[Entry] = FairQueue(policy)
        self._parked: dict[str, FairQueue[Entry]] = {}  # by salt: their tenants are at their limits
        self._no_turn_before_ms: dict[str, float] = {}  # by salt, while something is parked
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
            max_extents=max_extents,
            tenants=TierBytes(self._device_bytes, self._promises),
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
        most = request.resident.most
        if refusal is not None and refusal.fits_into(most):
            self._quarantine.lift(ref)
            refusal = None
        if refusal is not None:
            raise AdapterRefused(refusal.message, code=refusal.code)
        entry = self._entries.get(ref)
        if entry is not None and most is not None and entry.nbytes > most:
            raise AdapterRefused(_too_large(entry.nbytes, most), code=TOO_LARGE_FOR_TENANT)
        self.wait(sequence, now_ms)
        self._promises.tell(ref.salt, None if request.system else request.tenant, request.resident)
        return self.usable(ref)

    def wait(self, sequence: Sequence, now_ms: float) -> None:
        """The sequence waits, in its place by arrival."""
        ref = _ref_of(sequence)
        entry = self._entries.get(ref)
        known = entry is not None
        if entry is None:
            entry = self._entries[ref] = Entry(ref)
            self._promises.joined(ref.salt, sequence.tenant)
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
        if self._no_longer_wanted(entry) and self._holding(entry):
            self._device.release_hold()
        if entry.stage is Stage.MEASURED:
            self._loader.abandon(entry.ref)
        if entry.stage in (Stage.QUEUED, Stage.MEASURED):
            self._remove(entry)

    def usable(self, ref: AdapterRef) -> bool:
        """Whether a further request may pin the adapter now."""
        resident = self._device.get(ref)
        if resident is None or not resident.copied:
            return False
        return not (resident.draining or resident.leaving)

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
        if self._wanted or ref.salt in self._parked:
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
            or self._parked
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
        if self._parked:
            self._take_turns(now_ms, events)
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
            overdue = self._now_ms - entry.since_ms > self._config.adapter_aging_ms
            dropped = self._host.reserve(
                entry.ref, entry.nbytes, self._host_copy_can_go, overdue=overdue
            )
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
        limit = min(self._config.host_cache_bytes, self._device_bytes)
        refusal = None
        if event.nbytes > limit:
            refusal = ("adapter_too_large", f"of {event.nbytes} bytes; the limit is {limit} bytes")
        elif event.max_rank > self._max_rank:
            refusal = ("rank_out_of_range", f"rank {event.max_rank}; most is {self._max_rank}")
        if refusal is None and self._promises.too_large(event.ref.salt, event.nbytes):
            self._loader.abandon(event.ref)
            self._fail_for_limit(entry, now_ms, events)
            return
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
        nbytes: int | None = None,
    ) -> None:
        """The adapter cannot be had: its requests end, others of its key are refused a while."""
        self._host.drop(entry.ref)
        self._remove(entry)
        refusal = Quarantined(code, message, now_ms + retry_ms, nbytes)
        self._quarantine.put(entry.ref, refusal, now_ms)
        events.failed.extend((sequence, code, message) for sequence in entry.waiting.values())

    def _fail_for_limit(self, entry: Entry, now_ms: float, events: PoolEvents) -> None:
        """The adapter alone is more than its tenant may hold; a higher limit lifts it at once."""
        message = _too_large(entry.nbytes, self._promises.of(entry.ref.salt).most or 0)
        retry_ms = self._config.quarantine_ms
        self._fail(entry, TOO_LARGE_FOR_TENANT, message, now_ms, retry_ms, events, entry.nbytes)

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

    def _park(self, entry: Entry) -> None:
        self._parked.setdefault(entry.ref.salt, FairQueue(self._policy)).push(entry)

    def _no_longer_wanted(self, entry: Entry) -> bool:
        """Takes it out of the queue for the device; whether it was in it."""
        parked = self._parked.get(entry.ref.salt)
        if parked is not None and parked.remove(entry):
            if not parked:
                del self._parked[entry.ref.salt]
                self._no_turn_before_ms.pop(entry.ref.salt, None)
                self._device.spare(entry.ref.salt)
            return True
        return self._wanted.remove(entry)

    def _take_turns(self, now_ms: float, events: PoolEvents) -> None:
        """Tenants at their limits: their next adapter comes when their others leave room for it.

        What has waited too long gets the place of the tenant's own adapter that has been there
        longest, which then takes no new requests.
        """
        for salt in list(self._parked):
            head = self._next_of(self._parked[salt], now_ms)
            oldest = self._parked[salt].oldest()
            if head is None or oldest is None:
                raise AssertionError("nothing is parked where a queue is kept")
            if now_ms - oldest.arrival_ms > self._config.adapter_aging_ms:
                head = oldest
                if now_ms >= self._no_turn_before_ms.get(salt, -math.inf):
                    if self._device.tenants.over(salt, head.nbytes):
                        self._device.clear_for(salt)
                    copy_ms = self.load_times.predict_ms("host", head.nbytes)
                    self._no_turn_before_ms[salt] = now_ms + RESIDENCY_COPIES * copy_ms
            if self._promises.too_large(salt, head.nbytes):
                self._fail_for_limit(head, now_ms, events)
            elif self._device.make_way(head.ref, head.nbytes):
                self._no_longer_wanted(head)
                self._wanted.push(head)

    def _place_wanted(self, now_ms: float, needed_blocks: int, events: PoolEvents) -> None:
        self._relieve_starving(now_ms, events)
        refused = []
        most = self._device.most_extents(needed_blocks)
        tries = PLACEMENTS_PER_STEP
        while tries > 0 and most:
            entry = self._next_of(self._wanted, now_ms)
            if entry is None:
                break
            self._wanted.remove(entry)
            if not self._holding(entry) and not self._device.make_way(entry.ref, entry.nbytes):
                self._park(entry)
                continue
            tries -= 1
            extents = self._extents(entry)
            resident = None
            if extents <= most and not self._holding(entry):
                resident = self._device.place(entry.ref, extents, entry.nbytes, needed_blocks)
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
            if self._device.tenants.over(oldest.ref.salt, oldest.nbytes):
                self._wanted.remove(oldest)  # its own tenant's adapters are in its way
                self._park(oldest)
                return
            self._device.begin_hold(oldest.ref, self._extents(oldest), oldest.nbytes)
        resident = self._device.fill_hold()
        if resident is not None:
            copy_ms = self.load_times.predict_ms("host", self._entries[resident.ref].nbytes)
            self._no_hold_before_ms = now_ms + RESIDENCY_COPIES * copy_ms
            entry = self._entries[resident.ref]
            self._no_longer_wanted(entry)
            self._start_copy(entry, resident.slot, now_ms, events)

    def overdue(self, now_ms: float) -> list[AdapterRef]:
        """Adapters in use that have not left a place in time: their requests must stop.

        Without this the wait for a place would be as long as the longest answer.
        """
        hold = self._device.hold
        must_go = self._device.leaving if self._parked else []
        if hold is not None:
            must_go += [victim for victim in hold.victims if victim.pins]
        cached = self._config.prefix_caching
        keeps_ms = RESIDENCY_MS if cached else RECOMPUTED_RESIDENCY_MS
        return [resident.ref for resident in must_go if now_ms - resident.since_ms >= keeps_ms]

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
        self._no_longer_wanted(entry)
        if entry.stage is Stage.QUEUED:
            self._load_queue.remove(entry)
        elif entry.stage is Stage.MEASURED:
            self._measured.remove(entry)
        del self._entries[entry.ref]
        self._promises.left(entry.ref.salt)

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

    def by_tenant(self) -> dict[str, TenantResidency]:
        """What each tenant's adapters hold; a tenant has one salt."""
        on_device = (Stage.COPYING, Stage.DEVICE)
        device: Counter[str] = Counter()
        for entry in self._entries.values():
            if entry.stage in on_device:
                device[entry.ref.salt] += entry.nbytes
        found: dict[str, TenantResidency] = {}
        for salt, tenant in self._promises.names():
            other = found.get(tenant)
            found[tenant] = TenantResidency(
                device[salt] + (0 if other is None else other.device_bytes),
                self._host.tenants.held(salt) + (0 if other is None else other.host_bytes),
                self._promises.of(salt).most,
                self._promises.reserved(salt, self._device_bytes),
            )
        return found

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


def _too_large(nbytes: int, most: int) -> str:
    return (
        f"The adapter takes {nbytes} bytes in the engine and the tenant's adapters may hold {most} "
        "together; use a lower rank or fewer modules, or have max_resident_bytes raised."
    )


def _ref_of(sequence: Sequence) -> AdapterRef:
    ref = sequence.call.request.adapter
    if ref is None:
        raise AssertionError("a request of the base model has no place in the adapter pool")
    return ref
