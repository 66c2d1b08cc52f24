"""Adapter blobs in host memory: reserved before they are built, least recently used first to go."""

from collections import OrderedDict
from collections.abc import Callable

from engine.types import AdapterBlob, AdapterRef


class HostCache:
    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._reserved: dict[AdapterRef, int] = {}  # bytes, also of those that are filled
        self._blobs: OrderedDict[AdapterRef, AdapterBlob] = OrderedDict()

    def __contains__(self, ref: AdapterRef) -> bool:
        return ref in self._blobs

    def reserve(
        self, ref: AdapterRef, nbytes: int, evictable: Callable[[AdapterRef], bool]
    ) -> list[AdapterRef] | None:
        """Sets `nbytes` aside; which blobs were dropped for it, or None and nothing is changed."""
        missing = self.used_bytes + nbytes - self.budget_bytes
        chosen: list[AdapterRef] = []
        for candidate in self._blobs:
            if missing <= 0:
                break
            if evictable(candidate):
                chosen.append(candidate)
                missing -= self._reserved[candidate]
        if missing > 0:
            return None
        for candidate in chosen:
            self.drop(candidate)
        self._reserved[ref] = nbytes
        self.used_bytes += nbytes
        return chosen

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
        self.used_bytes -= self._reserved.pop(ref, 0)
