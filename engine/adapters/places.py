"""Adapters on their way from host memory to a place on the device: whose turn it is.

    wanted ──(a place: device_space.py)──> copying ──> device
    parked ──(their tenant's others leave)──> wanted

What has waited too long gets the place of what has been there longest. Where on the device an
adapter lies, and what gives way for it, is `DeviceSpace`'s.
"""

import logging
import math
from collections.abc import Callable, Mapping

from engine.adapters.copy_pace import CopyPace
from engine.adapters.device_space import DeviceSpace, Resident
from engine.adapters.entry import Entry, Stage
from engine.adapters.failures import Failed, over_limit
from engine.adapters.host_cache import HostCache
from engine.adapters.resident_bytes import ResidentPromises
from engine.clock import Clock
from engine.config import EngineConfig
from engine.load_time import LoadTimes
from engine.policy import Policy
from engine.types import AdapterRef, Executor
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

log = logging.getLogger(__name__)


class Places:
    """`clock`: times how long copies hold up the step loop; without one that is nothing."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        device: DeviceSpace,
        host: HostCache,
        entries: Mapping[AdapterRef, Entry],
        promises: ResidentPromises,
        policy: Policy,
        times: LoadTimes,
        clock: Clock | None,
    ) -> None:
        self._config = config
        self._executor = executor
        self._device = device
        self._host = host
        self._entries = entries
        self._promises = promises
        self._policy = policy
        self._times = times
        self._clock = clock
        self._extent_bytes = executor.description.kv_block_bytes
        self.pace = CopyPace(config.copy_bytes_per_step)
        self._wanted: FairQueue[Entry] = FairQueue(policy)
        self._parked: dict[str, FairQueue[Entry]] = {}  # by salt: their tenants are at their limits
        self._no_turn_before_ms: dict[str, float] = {}  # by salt, while something is parked
        self._no_hold_before_ms = -math.inf
        self._wait_ms = 0.0  # that adapters had lately, from host memory to a place

    @property
    def busy(self) -> bool:
        """Whether an adapter waits for a place, or is being copied to one."""
        return bool(self._wanted or self._parked or self._device.copying())

    def expected_ms(self, ref: AdapterRef, nbytes: int) -> float:
        """How long from host memory to the device, behind those that wait; 0 bytes: not known."""
        copy_ms = (1 + len(self._wanted)) * self._times.predict_ms("host", nbytes)
        if self._wanted or ref.salt in self._parked:
            copy_ms += self._wait_ms
        return copy_ms

    # ------------------------------------------------------------------ who waits

    def want(self, entry: Entry, now_ms: float) -> None:
        """An adapter in host memory is to come onto the device."""
        entry.stand_for_oldest(now_ms)
        self._wanted.push(entry)

    def withdraw(self, entry: Entry) -> None:
        """Nobody waits for the adapter any more: what was kept for it is given back."""
        if self._take_out(entry) and self._holding(entry):
            self._device.release_hold()

    def _take_out(self, entry: Entry) -> bool:
        """Takes it out of the queue for the device; whether it was in it."""
        salt = entry.ref.salt
        parked = self._parked.get(salt)
        if parked is not None and parked.remove(entry):
            if not parked:
                del self._parked[salt]
                self._no_turn_before_ms.pop(salt, None)
                self._device.spare(salt)
            return True
        return self._wanted.remove(entry)

    def _park(self, entry: Entry) -> None:
        self._parked.setdefault(entry.ref.salt, FairQueue(self._policy)).push(entry)

    def _next_of(self, queue: FairQueue[Entry], now_ms: float) -> Entry | None:
        return queue.next(now_ms, hurries=self._policy.keeps_budgets)

    # ------------------------------------------------------------------ a tenant at its limit

    def take_turns(self, now_ms: float) -> list[Failed]:
        """Tenants at their limits: their next adapter comes when their others leave room for it.

        What has waited too long gets the place of the tenant's own adapter that has been there
        longest, which then takes no new requests. Those that can never come are returned.
        """
        failed = []
        for salt in list(self._parked):
            head = self._turn_of(salt, now_ms)
            if self._promises.too_large(salt, head.nbytes):
                most = self._promises.of(salt).most or 0
                failed.append(over_limit(head, most, self._config.quarantine_ms))
            elif self._device.make_way(head.ref, head.nbytes):
                self._take_out(head)
                self._wanted.push(head)
        return failed

    def _turn_of(self, salt: str, now_ms: float) -> Entry:
        """The tenant's next adapter; an overdue one has another told to leave."""
        head = self._next_of(self._parked[salt], now_ms)
        oldest = self._parked[salt].oldest()
        if head is None or oldest is None:
            raise AssertionError("nothing is parked where a queue is kept")
        if now_ms - oldest.arrival_ms <= self._config.adapter_aging_ms:
            return head
        if now_ms >= self._no_turn_before_ms.get(salt, -math.inf):
            if self._device.tenants.over(salt, oldest.nbytes):
                self._device.clear_for(salt)
            self._no_turn_before_ms[salt] = now_ms + self._rest_ms(oldest)
        return oldest

    def _rest_ms(self, entry: Entry) -> float:
        """How long no further place changes hands by age after this one did."""
        return RESIDENCY_COPIES * self._times.predict_ms("host", entry.nbytes)

    # ------------------------------------------------------------------ places

    def fill(self, now_ms: float, needed_blocks: Callable[[], int]) -> list[Failed]:
        """Gives places to those whose turn it is; those whose copy could not begin are returned.

        `needed_blocks()`: KV blocks that running sequences cannot do without.
        """
        if not self._wanted:
            return []
        needed = needed_blocks()
        failed = self._relieve_starving(now_ms)
        refused = []
        most = self._device.most_extents(needed)
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
            resident = self._place(entry, most, needed)
            if resident is None:
                refused.append(entry)
            else:
                failed += self._start_copy(entry, resident, now_ms)
                most = self._device.most_extents(needed)
        for entry in refused:
            self._wanted.push(entry)
        return failed

    def _place(self, entry: Entry, most: int, needed_blocks: int) -> Resident | None:
        """A place for an adapter of at most `most` extents; one with a hold waits for that."""
        extents = self._extents(entry)
        if extents > most or self._holding(entry):
            return None
        return self._device.place(entry.ref, extents, entry.nbytes, needed_blocks)

    def _relieve_starving(self, now_ms: float) -> list[Failed]:
        """Gives the adapter that has waited too long the place of those resident longest."""
        oldest = self._wanted.oldest()
        if self._device.hold is None and oldest is not None:
            if now_ms - oldest.arrival_ms <= self._config.adapter_aging_ms:
                return []
            if now_ms < self._no_hold_before_ms:
                return []
            if self._device.tenants.over(oldest.ref.salt, oldest.nbytes):
                self._wanted.remove(oldest)  # its own tenant's adapters are in its way
                self._park(oldest)
                return []
            self._device.begin_hold(oldest.ref, self._extents(oldest), oldest.nbytes)
        resident = self._device.fill_hold()
        if resident is None:
            return []
        entry = self._entries[resident.ref]
        self._no_hold_before_ms = now_ms + self._rest_ms(entry)
        self._take_out(entry)
        return self._start_copy(entry, resident, now_ms)

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

    def _extents(self, entry: Entry) -> int:
        """Extents that the adapter takes on the device; its size must be known."""
        return -(-entry.nbytes // self._extent_bytes)

    def _holding(self, entry: Entry) -> bool:
        return self._device.hold is not None and self._device.hold.ref == entry.ref

    # ------------------------------------------------------------------ copies

    def _start_copy(self, entry: Entry, resident: Resident, now_ms: float) -> list[Failed]:
        blob = self._host.get(entry.ref)
        if blob is None:
            raise AssertionError("an adapter is copied from host memory")
        try:
            first = self._device.span_of(resident).first
            self._executor.start_copy(resident.slot, first, blob)
        except Exception:
            log.exception("an adapter could not be copied to the device")
            self._device.drop(entry.ref)
            message = "The adapter could not be copied to the device."
            return [Failed(entry, "adapter_copy_failed", message, self._config.quarantine_ms)]
        entry.stage = Stage.COPYING
        resident.since_ms = now_ms
        self.pace.started(resident.slot, entry.nbytes)
        self._wait_ms += PLACE_MEMORY * (now_ms - entry.arrival_ms - self._wait_ms)
        entry.since_ms = now_ms
        return []

    def take_in_copies(self, now_ms: float, copy_bytes: int) -> list[Entry]:
        """Moves copies on by at most so many bytes; the adapters that are complete."""
        complete = []
        for slot in self._poll(copy_bytes):
            entry = self._entries[self._device.copied(slot).ref]
            entry.stage = Stage.DEVICE
            self._times.observe("host", entry.nbytes, now_ms - entry.since_ms)
            complete.append(entry)
        return complete

    def _poll(self, copy_bytes: int) -> list[int]:
        """The slots that are complete."""
        if self._clock is None:
            return self._executor.poll_copies(copy_bytes)
        began_ms = self._clock.now_ms()
        complete = self._executor.poll_copies(copy_bytes)
        self.pace.moved(copy_bytes, self._clock.now_ms() - began_ms)
        return complete

    def drop(self, ref: AdapterRef) -> None:
        """Takes an adapter that nobody uses off the device, complete or not."""
        resident = self._device.get(ref)
        if resident is not None:
            self.pace.dropped(resident.slot)
            self._device.drop(ref)
