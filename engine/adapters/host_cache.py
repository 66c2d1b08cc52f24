"""Adapter blobs in host memory: reserved before they are built, least recently used first to go."""

from collections import Counter, OrderedDict
from collections.abc import Callable

from engine.adapters.resident_bytes import TierBytes
from engine.types import AdapterBlob, AdapterRef


class HostCache:
    def __init__(self, budget_bytes: int, tenants: TierBytes) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.tenants = tenants
        self._reserved: dict[AdapterRef, int] = {}  # bytes, also of those that are filled
        self._blobs: OrderedDict[AdapterRef, AdapterBlob] = OrderedDict()

    def __contains__(self, ref: AdapterRef) -> bool:
        return ref in self._blobs

    def reserve(
        self,
        ref: AdapterRef,
        nbytes: int,
        evictable: Callable[[AdapterRef], bool],
        *,
        overdue: bool = False,
    ) -> list[AdapterRef] | None:
        """Sets `nbytes` aside; which blobs were dropped for it, or None and nothing is changed.

        A tenant over its limit gives up its own. What others have reserved stays, unless the
        adapter is `overdue`: it has waited too long.
        """
        missing = self.used_bytes + nbytes - self.budget_bytes
        over = self.tenants.over(ref.salt, nbytes)
        chosen: list[AdapterRef] = []
        gone: Counter[str] = Counter()
        for candidate in self._blobs:
            if missing <= 0 and over <= 0:
                break
            own = candidate.salt == ref.salt
            if not own and (missing <= 0 or self._kept(candidate.salt, gone, overdue=overdue)):
                continue
            if evictable(candidate):
                chosen.append(candidate)
                size = self._reserved[candidate]
                gone[candidate.salt] += size
                missing -= size
                over -= size if own else 0
        if missing > 0 or over > 0:
            return None
        for candidate in chosen:
            self.drop(candidate)
        self._reserved[ref] = nbytes
        self.used_bytes += nbytes
        self.tenants.take(ref.salt, nbytes)
        return chosen

    def _kept(self, salt: str, gone: Counter[str], *, overdue: bool) -> bool:
        return not overdue and self.tenants.keeps(salt, gone[salt])

    def fill(self, ref: AdapterRef, blob: AdapterBlob) -> None:
        """Puts the blob into its reservation."""
        if self._reserved.get(ref) != blob.layout.nbytes or blob.data.nbytes != blob.layout.nbytes:
            raise ValueError("the blob does not have the size that was reserved for it")
        self._blobs[ref] = blob

    def get(self, ref: AdapterRef) -> AdapterBlob | None:
        """The blob, now the most recently used."""
        blob = self._blobs.get(ref)
        if blob is not None:
            self._blobs.move_to_end(ref)
        return blob

    def drop(self, ref: AdapterRef) -> None:
        """Gives back what the adapter holds here, filled or only reserved."""
        self._blobs.pop(ref, None)
        nbytes = self._reserved.pop(ref, 0)
        self.used_bytes -= nbytes
        if nbytes:
            self.tenants.give(ref.salt, nbytes)
