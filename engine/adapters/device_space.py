"""Where adapters lie in the arena: slots, spans, what gives way for whom, and the hold.

An adapter in use (pinned) or being copied is never touched. Room for one more is sought in this
order: a hole, cached prefix blocks, moving idle adapters together, dropping idle ones that nobody
waits for, least recently used first. What still does not fit waits; once it has waited too long it
gets a hold: a window whose present adapters are let run dry.
"""

import heapq
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.adapters.resident_bytes import TierBytes
from engine.arena import Arena, Span
from engine.kv_blocks import KvBlocks
from engine.types import AdapterRef, Executor


@dataclass(slots=True, eq=False)
class Resident:
    """An adapter with a slot and a span. `copied` once the executor can use it."""

    ref: AdapterRef
    slot: int
    placed: int  # counts placements: the lower, the longer it has been here
    nbytes: int
    copied: bool = False
    pins: int = 0
    draining: bool = False  # must leave: no new request may pin it
    leaving: bool = False  # must leave as well, for another adapter of its tenant
    since_ms: float = 0.0  # when it was placed

    @property
    def idle(self) -> bool:
        return self.copied and self.pins == 0


@dataclass(slots=True)
class Hold:
    """The window kept for one adapter, and who has to leave before it fits."""

    ref: AdapterRef
    extents: int
    nbytes: int
    victims: list[Resident] = field(default_factory=list)


class DeviceSpace:
    """The device tier. `order_of(ref)` is the arrival of the longest waiting request, or None."""

    def __init__(
        self,
        arena: Arena,
        blocks: KvBlocks,
        executor: Executor,
        *,
        max_slots: int,
        max_extents: int,
        tenants: TierBytes,
        order_of: Callable[[AdapterRef], tuple[int, int] | None],
        on_evicted: Callable[[AdapterRef], None],
        on_spared: Callable[[AdapterRef], object],
    ) -> None:
        self.max_extents = max_extents
        self.tenants = tenants
        self._arena = arena
        self._blocks = blocks
        self._executor = executor
        self._order_of = order_of
        self._on_evicted = on_evicted
        self._on_spared = on_spared
        self._free_slots = list(range(max_slots))
        self._residents: dict[AdapterRef, Resident] = {}
        self._by_slot: dict[int, Resident] = {}
        self._idle: OrderedDict[AdapterRef, Resident] = OrderedDict()  # least recently used first
        self._placements = 0
        self.hold: Hold | None = None

    def get(self, ref: AdapterRef) -> Resident | None:
        return self._residents.get(ref)

    def copying(self) -> bool:
        return any(not resident.copied for resident in self._residents.values())

    def span_of(self, resident: Resident) -> Span:
        return self._arena.span(resident.slot)

    # ------------------------------------------------------------------ use

    def copied(self, slot: int) -> Resident:
        """The executor has the whole adapter."""
        resident = self._by_slot[slot]
        resident.copied = True
        self._idle[resident.ref] = resident
        return resident

    def pin(self, ref: AdapterRef) -> int:
        """The slot of a usable adapter, which stays where it is until unpinned."""
        resident = self._residents[ref]
        resident.pins += 1
        self._idle.pop(ref, None)
        return resident.slot

    def unpin(self, ref: AdapterRef) -> None:
        resident = self._residents[ref]
        resident.pins -= 1
        if resident.pins == 0:
            self._idle[ref] = resident

    # ------------------------------------------------------------------ making room for adapters

    def make_way(self, ref: AdapterRef, nbytes: int) -> bool:
        """Drops idle adapters of the same tenant until one more lies within its limit; whether it
        does."""
        while self.tenants.over(ref.salt, nbytes):
            if not self._drop_idle(ref.salt, own=True):
                return False
        return True

    def place(
        self, ref: AdapterRef, extents: int, nbytes: int, needed_blocks: int
    ) -> Resident | None:
        """A slot and a span for an adapter that lies within its tenant's limit, or None.

        `needed_blocks`: how many KV blocks running sequences cannot do without.
        """
        while self._slots_left() < 1 or self._share_left() < extents:
            if not self._drop_idle(ref.salt):
                return None
        while True:
            spare = self._blocks.available - needed_blocks
            if self._arena.has_hole(extents, spare):
                return self._settle(ref, nbytes, self._arena.place(self._free_slots[0], extents))
            if extents <= spare and self._clear_below(extents):
                continue
            if not self._compact() and not self._drop_idle(ref.salt):
                return None

    def _clear_below(self, extents: int) -> bool:
        """Frees the cached blocks below the adapters; whether so many extents are free there now.

        A KV block that is used inside the hold bars it: every block lies below every adapter.
        """
        first = self._arena.kv_limit - extents
        above = Span(first, self._arena.extents - first)
        if first < 0 or self._blocks.referenced_in(above):
            return False
        return self._blocks.clear(above)

    def most_extents(self, needed_blocks: int) -> int:
        """No adapter of more extents than this can be placed, whatever idle ones are dropped."""
        idle = self._idle.values()
        droppable = [self.span_of(r).count for r in idle if r.leaving or self._unwanted(r.ref)]
        if self._slots_left() + len(droppable) < 1:
            return 0
        used = self._arena.kv_used - self._blocks.cached + self._arena.adapter_used
        free = self._arena.extents - used - needed_blocks
        return max(0, min(free, self._share_left()) + sum(droppable))

    def _slots_left(self) -> int:
        return len(self._free_slots) - (self.hold is not None)

    def _share_left(self) -> int:
        held = 0 if self.hold is None else self.hold.extents
        return self.max_extents - self._arena.adapter_used - held

    def _unwanted(self, ref: AdapterRef) -> bool:
        return self._order_of(ref) is None

    def _reserved(self, ref: AdapterRef, salt: str | None) -> bool:
        """Whether the adapter is one that its tenant has reserved the place of, against others."""
        return ref.salt != salt and self.tenants.keeps(ref.salt)

    def _can_go(self, ref: AdapterRef, salt: str | None) -> bool:
        leaving = self._residents[ref].leaving
        return leaving or (self._unwanted(ref) and not self._reserved(ref, salt))

    def drop(self, ref: AdapterRef) -> None:
        """Takes an unpinned adapter off the device, complete or not."""
        resident = self._residents[ref]
        if resident.pins:
            raise ValueError("a pinned adapter cannot be dropped")
        del self._residents[ref]
        self._executor.drop_adapter(resident.slot)
        self._arena.release(resident.slot)
        self.tenants.give(ref.salt, resident.nbytes)
        heapq.heappush(self._free_slots, resident.slot)
        del self._by_slot[resident.slot]
        self._idle.pop(ref, None)
        if self.hold is not None and resident in self.hold.victims:
            self.hold.victims.remove(resident)

    def clear_for(self, salt: str) -> Resident | None:
        """Lets the tenant's adapter that has been here longest run dry, for another of its own."""
        mine = [r for r in self._residents.values() if r.ref.salt == salt and r.copied]
        if not mine or any(resident.leaving for resident in mine):
            return None
        oldest = min(mine, key=lambda resident: resident.placed)
        oldest.leaving = True
        return oldest

    def spare(self, salt: str) -> None:
        """None of the tenant's adapters has to make way any more."""
        for resident in self._residents.values():
            if resident.leaving and resident.ref.salt == salt:
                resident.leaving = False
                self._on_spared(resident.ref)

    @property
    def leaving(self) -> list[Resident]:
        """Adapters in use that make way for another of their tenant."""
        return [r for r in self._residents.values() if r.leaving and r.pins]

    # ------------------------------------------------------------------ making room for KV

    def reclaim(self, blocks: int, *, force: bool = False, keep: AdapterRef | None = None) -> bool:
        """Moves and drops idle adapters until `blocks` KV blocks are available; whether they are.

        `force`: also those that somebody waits for, and the hold. `keep` stays on the device.
        """
        if self._blocks.available >= blocks:
            return True
        if force:
            self.release_hold()
        self._compact()
        while self._blocks.available < blocks:
            if not self._lowest_can_go() or not self._drop_idle(force=force, keep=keep):
                return False
            self._compact()
        return True

    def _lowest_can_go(self) -> bool:
        """Below a pinned adapter there is nothing to win for KV."""
        spans = self._arena.spans()
        if not spans:
            return False
        return self._by_slot[min(spans, key=lambda slot: spans[slot].first)].idle

    def _drop_idle(
        self,
        salt: str | None = None,
        *,
        own: bool = False,
        force: bool = False,
        keep: AdapterRef | None = None,
    ) -> bool:
        """Drops one idle adapter for a tenant (its salt), or for KV; `own`: of the tenant's."""
        for ref in self._idle:
            if own and ref.salt != salt:
                continue
            if ref != keep and (force or self._can_go(ref, salt)):
                self.drop(ref)
                self._on_evicted(ref)
                return True
        return False

    def _compact(self) -> bool:
        moves = self._arena.compact(lambda slot: self._by_slot[slot].idle)
        for slot, first in moves:
            self._executor.move_adapter(slot, first)
        return bool(moves)

    # ------------------------------------------------------------------ the hold

    def begin_hold(self, ref: AdapterRef, extents: int, nbytes: int) -> bool:
        """Chooses a window for an adapter that has waited too long; whether there is one.

        The adapters in it are not given to further requests; those that have been resident longest
        go first, so that more adapters than fit take turns.
        """
        chosen = self._choose_window(ref, extents, sparing=True)
        chosen = chosen or self._choose_window(ref, extents, sparing=False)
        if chosen is None:
            return False
        window, victims = chosen
        for resident in victims:
            resident.draining = True
        self._arena.hold(window)
        self.tenants.take(ref.salt, nbytes)  # until it is placed: nothing else may use its limit up
        self._blocks.clear(window)
        self.hold = Hold(ref, extents, nbytes, victims)
        return True

    def fill_hold(self) -> Resident | None:
        """Places the holding adapter once everything has left its window."""
        hold = self.hold
        if hold is None:
            return None
        for resident in [victim for victim in hold.victims if victim.idle]:
            self.drop(resident.ref)
            self._on_evicted(resident.ref)
        window = self._arena.held
        if window is None or not self._free_slots or hold.victims:
            return None
        self._blocks.clear(window)
        span = self._arena.place_held(self._free_slots[0])
        if span is None:
            return None
        self.hold = None
        self.tenants.give(hold.ref.salt, hold.nbytes)
        return self._settle(hold.ref, hold.nbytes, span)

    def release_hold(self) -> None:
        if self.hold is None:
            return
        for resident in self.hold.victims:
            resident.draining = False
            self._on_spared(resident.ref)
        self.tenants.give(self.hold.ref.salt, self.hold.nbytes)
        self.hold = None
        self._arena.release_hold()

    def _choose_window(
        self, ref: AdapterRef, extents: int, *, sparing: bool
    ) -> tuple[Span, list[Resident]] | None:
        """Least KV in use first, then the adapters that were placed longest ago.

        `sparing`: what other tenants have reserved stays.
        """
        order = self._order_of(ref)
        spans = sorted(self._arena.spans().items(), key=lambda item: item[1].first)
        residents = [self._by_slot[slot] for slot, _ in spans]
        firsts = [span.first for _, span in spans]
        ends = [span.end for _, span in spans]
        staying = {
            r.ref
            for r in residents
            if not self._may_go(r, order) or (sparing and self._reserved(r.ref, ref.salt))
        }
        leaving = [r for r in residents if r.ref not in staying]
        leaving.sort(key=lambda resident: resident.placed)
        top = self._arena.extents - extents
        best: tuple[tuple[int, int, int, int], Span, list[Resident]] | None = None
        for first in {top, *ends, *(end - extents for end in firsts)}:
            if not 0 <= first <= top:
                continue
            window = Span(first, extents)
            inside = residents[bisect_right(ends, first) : bisect_left(firsts, window.end)]
            if any(resident.ref in staying for resident in inside):
                continue
            victims = self._with_enough(inside, leaving, extents)
            if victims is None:
                continue
            latest = max((victim.placed for victim in victims), default=0)
            cost = (self._blocks.referenced_in(window), latest, len(victims), -first)
            if best is None or cost < best[0]:
                best = (cost, window, victims)
        return None if best is None else best[1:]

    def _may_go(self, resident: Resident, order: tuple[int, int] | None) -> bool:
        """Not if it is idle and a request waits for it that is older than the holding one."""
        theirs = self._order_of(resident.ref)
        return resident.pins > 0 or theirs is None or order is None or order < theirs

    def _with_enough(
        self, inside: list[Resident], leaving: list[Resident], extents: int
    ) -> list[Resident] | None:
        """The victims of a window and as many more as the slots and the share ask for."""
        victims = list(inside)
        used = self._arena.adapter_used - sum(self.span_of(v).count for v in victims)
        others = (resident for resident in leaving if resident not in inside)
        while used + extents > self.max_extents or (not victims and not self._free_slots):
            victim = next(others, None)
            if victim is None:
                return None
            victims.append(victim)
            used -= self.span_of(victim).count
        return victims

    def _settle(self, ref: AdapterRef, nbytes: int, span: Span | None) -> Resident:
        if span is None:
            raise AssertionError("the hole that was found is gone")
        slot = heapq.heappop(self._free_slots)
        self._placements += 1
        resident = Resident(ref, slot, self._placements, nbytes)
        self.tenants.take(ref.salt, nbytes)
        self._residents[ref] = resident
        self._by_slot[slot] = resident
        return resident
