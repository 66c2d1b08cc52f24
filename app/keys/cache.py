"""What one api process remembers of keys, for a few seconds, so that a request needs no SQL.

Times of a key (expiry, revocation) are checked at every use; only changes made by another process
wait for the entry to age. This process forgets an entry when it changes the key or its tenant.
"""

from collections import OrderedDict
from dataclasses import dataclass
from datetime import datetime

from app.caller import Caller
from app.crypto import KeyedHash
from app.keys.networks import Network

CAPACITY = 10_000


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """One key as it was read. `caller` is None when there is no such key."""

    caller: Caller | None
    stored: KeyedHash
    tenant_active: bool
    expires_at: datetime | None
    revoke_at: datetime | None
    revoked_at: datetime | None
    networks: tuple[Network, ...] | None = None  # None: usable from everywhere


class KeyCache:
    """Entries by public id; the least recently used go first."""

    def __init__(self, ttl_s: float, capacity: int = CAPACITY) -> None:
        self._ttl_ms = ttl_s * 1000
        self._capacity = capacity
        self._entries: OrderedDict[str, tuple[float, KeyEntry]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, public_id: str, now_ms: float) -> KeyEntry | None:
        """The entry unless it is older than the time to live."""
        held = self._entries.get(public_id)
        if held is None or now_ms - held[0] >= self._ttl_ms:
            return None
        self._entries.move_to_end(public_id)
        return held[1]

    def put(self, public_id: str, entry: KeyEntry, now_ms: float) -> None:
        self._entries[public_id] = (now_ms, entry)
        self._entries.move_to_end(public_id)
        while len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    def clear(self) -> None:
        """Forgets everything, after any change to keys or tenants."""
        self._entries.clear()
