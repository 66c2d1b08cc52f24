"""The adapter pool: what is on its way, in host memory, on the device; who waits for it.

    wanted ──> loads.py: store to host memory ──> places.py: host memory to a place ──> usable

Keys are (tenant salt, digest): nobody learns from a load time what another tenant uploaded. All
budgets are bytes (or extents of the arena). Nothing here waits: `advance` moves everything on by
what has happened since, and says whose adapter became usable and whose failed.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.adapters.device_space import DeviceSpace
from engine.adapters.entry import Entry, Stage, ref_of
from engine.adapters.failures import TOO_LARGE_FOR_TENANT, Failed, too_large
from engine.adapters.host_cache import HostCache
from engine.adapters.loading import Loader
from engine.adapters.loads import Loads
from engine.adapters.places import Places
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
from engine.types import AdapterRef, Executor, Residency, TenantResidency

ERASED_MS = 5_000.0
"""How long an erased adapter is refused: calls that were on their way must not bring it back."""


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
        self._policy = policy
        self._blocks = blocks
        self._entries: dict[AdapterRef, Entry] = {}
        self._promises = ResidentPromises()
        self._quarantine = Quarantine()
        self._spared: list[AdapterRef] = []  # were to leave the device and need not any more
        self._now_ms = 0.0
        self.evictions = 0
        self.loads = 0
        max_extents = int(arena.extents * config.adapter_share)
        self._device_bytes = max_extents * executor.description.kv_block_bytes
        host_bytes = config.host_cache_bytes
        self._host = HostCache(host_bytes, TierBytes(host_bytes, self._promises))
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
        times = LoadTimes()
        self._loads = Loads(
            config,
            loader,
            self._host,
            self._entries,
            self._promises,
            policy,
            times,
            largest_bytes=min(host_bytes, self._device_bytes),
            max_rank=min(config.max_rank, executor.description.max_rank),
            on_gone=self._remove,
        )
        self.places = Places(
            config,
            executor,
            self._device,
            self._host,
            self._entries,
            self._promises,
            policy,
            times,
            clock,
        )

    # ------------------------------------------------------------------ requests

    def enqueue(self, sequence: Sequence, now_ms: float) -> bool:
        """The sequence waits for its adapter, whose load begins now; whether it is usable already.

        Raises AdapterRefused while the adapter is in quarantine or being erased.
        """
        request = sequence.call.request
        ref = ref_of(sequence)
        if request.system and not self._loads.erasing(ref):
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
            raise AdapterRefused(too_large(entry.nbytes, most), code=TOO_LARGE_FOR_TENANT)
        self.wait(sequence, now_ms)
        self._promises.tell(ref.salt, None if request.system else request.tenant, request.resident)
        return self.usable(ref)

    def wait(self, sequence: Sequence, now_ms: float) -> None:
        """The sequence waits, in its place by arrival."""
        ref = ref_of(sequence)
        entry = self._entries.get(ref)
        if entry is None:
            entry = self._entries[ref] = Entry(ref)
            self._promises.joined(ref.salt, sequence.tenant)
            entry.join(sequence)
            self._loads.begin(entry, now_ms)
            return
        wanted = bool(entry.waiting)
        entry.join(sequence)
        if entry.stage is Stage.HOST and not wanted:
            self.places.want(entry, now_ms)

    def leave(self, sequence: Sequence) -> None:
        """The sequence no longer waits for its adapter."""
        entry = self._entries.get(ref_of(sequence))
        if entry is None or entry.waiting.pop(sequence.order, None) is None or entry.waiting:
            return
        self.places.withdraw(entry)
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
        ref = ref_of(sequence)
        self._entries[ref].waiting.pop(sequence.order, None)
        return self._device.pin(ref)

    def unpin(self, ref: AdapterRef) -> None:
        self._device.unpin(ref)

    def nbytes(self, ref: AdapterRef) -> int:
        return self._entries[ref].nbytes

    def rank(self, ref: AdapterRef) -> int:
        return self._entries[ref].max_rank

    def expected_ms(self, ref: AdapterRef) -> float:
        """How long until the adapter is usable, if loads take as long as they did; 0: it is."""
        if self.usable(ref):
            return 0.0
        entry = self._entries.get(ref)
        nbytes = 0 if entry is None else entry.nbytes
        copy_ms = self.places.expected_ms(ref, nbytes)
        if entry is not None and entry.stage in (Stage.HOST, Stage.COPYING):
            return copy_ms
        return self._loads.expected_ms(nbytes) + copy_ms

    def reclaim(self, blocks: int, *, force: bool = False, keep: AdapterRef | None = None) -> bool:
        """Lets idle adapters give way until `blocks` KV blocks are available; whether they are."""
        return self._device.reclaim(blocks, force=force, keep=keep)

    # ------------------------------------------------------------------ the step

    @property
    def busy(self) -> bool:
        """Whether loads or copies are under way or to be started."""
        return self._loads.busy or self.places.busy or bool(self._spared)

    def advance(
        self, now_ms: float, needed_blocks: Callable[[], int], copy_bytes: int
    ) -> PoolEvents:
        """Takes in what loaders and copies have finished and starts what can be started.

        `needed_blocks()`: KV blocks that running sequences cannot do without.
        """
        self._now_ms = now_ms
        events = PoolEvents()
        for outcome in self._loads.poll(now_ms):
            if isinstance(outcome, Failed):
                self._fail(outcome, events)
            else:
                self._in_host_memory(outcome)
        for failed in self._loads.start(now_ms):
            self._fail(failed, events)
        for failed in self.places.take_turns(now_ms):
            self._fail(failed, events)
        for failed in self.places.fill(now_ms, needed_blocks):
            self._fail(failed, events)
        for entry in self.places.take_in_copies(now_ms, copy_bytes):
            events.usable.extend(entry.waiting.values())
        while self._spared:
            spared = self._entries.get(self._spared.pop())
            if spared is not None and self.usable(spared.ref):
                events.usable.extend(spared.waiting.values())
        return events

    def _in_host_memory(self, entry: Entry) -> None:
        """An adapter was loaded: charged to the first that waits, and on to the device."""
        self.loads += 1
        first = entry.oldest
        if first is not None:
            self._policy.charge(first.tenant, first.call.weight, load_cost(entry.nbytes))
            self.places.want(entry, self._now_ms)

    def _fail(self, failed: Failed, events: PoolEvents) -> None:
        """The adapter cannot be had: its requests end, others of its key are refused a while."""
        entry, code, message = failed.entry, failed.code, failed.message
        self._host.drop(entry.ref)
        self._remove(entry)
        refusal = Quarantined(code, message, self._now_ms + failed.retry_ms, failed.nbytes)
        self._quarantine.put(entry.ref, refusal, self._now_ms)
        events.failed.extend((sequence, code, message) for sequence in entry.waiting.values())

    def _evicted(self, ref: AdapterRef) -> None:
        """The adapter left the device; whoever still waits for it makes it come back."""
        self.evictions += 1
        entry = self._entries[ref]
        if ref in self._host:
            entry.stage = Stage.HOST
            if entry.waiting:
                self.places.want(entry, self._now_ms)
        elif entry.waiting:
            self._loads.begin(entry, self._now_ms)
        else:
            self._remove(entry)

    def _remove(self, entry: Entry) -> None:
        """The adapter is not known any more."""
        self.places.withdraw(entry)
        self._loads.withdraw(entry)
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
            self.places.drop(ref)
            self._loads.erase(entry)
            self._remove(entry)
        return not self._loads.erasing(ref)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory held, those of blobs being built included."""
        return self._host.used_bytes

    def device_bytes(self) -> int:
        """True bytes of the adapters on the device (spans are rounded up to extents)."""
        return sum(entry.nbytes for entry in self._entries.values() if entry.stage.on_device)

    def by_tenant(self) -> dict[str, TenantResidency]:
        """What each tenant's adapters hold; a tenant has one salt."""
        device: Counter[str] = Counter()
        for entry in self._entries.values():
            if entry.stage.on_device:
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
