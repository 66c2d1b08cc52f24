"""Bytes that a tenant's adapters may hold in a tier, and those that others cannot take from it.

Pure accounting by the adapters' salt, which stands for the tenant. A limit bounds what a tenant
holds; a reservation keeps adapters that nobody waits for in place as long as the tenant's hold no
more than it. Reservations together are never more than `RESERVED_SHARE` of a tier: beyond that each
counts for its part of it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from engine.types import ResidentBytes

RESERVED_SHARE = 0.5
"""Of a tier, the most that all reservations together keep from the rest."""
NO_PROMISE = ResidentBytes()


@dataclass(slots=True)
class _Tenant:
    name: str
    promise: ResidentBytes = NO_PROMISE
    adapters: int = 0  # known to the pool, in whatever stage


class ResidentPromises:
    """What was said of each tenant last, while the pool knows an adapter of it."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._reserved = 0

    def tell(self, salt: str, tenant: str | None, promise: ResidentBytes) -> None:
        """A request of the tenant says what holds now; without its name, a probe says it."""
        found = self._tenants.get(salt)
        if found is None:
            return
        self._reserved += promise.reserved - found.promise.reserved
        found.name, found.promise = tenant or found.name, promise

    def joined(self, salt: str, tenant: str) -> None:
        """The pool knows one adapter more; `tenant`: whose it is said to be, if nobody said yet."""
        self._tenants.setdefault(salt, _Tenant(tenant)).adapters += 1

    def left(self, salt: str) -> None:
        found = self._tenants[salt]
        found.adapters -= 1
        if not found.adapters:
            self._reserved -= found.promise.reserved
            del self._tenants[salt]

    def of(self, salt: str) -> ResidentBytes:
        found = self._tenants.get(salt)
        return NO_PROMISE if found is None else found.promise

    def too_large(self, salt: str, nbytes: int) -> bool:
        """Whether one adapter of so many bytes can never fit."""
        most = self.of(salt).most
        return most is not None and nbytes > most

    def reserved(self, salt: str, tier_bytes: int) -> int:
        """The reservation as far as a tier of so many bytes keeps it."""
        own, most = self.of(salt).reserved, int(RESERVED_SHARE * tier_bytes)
        return own if self._reserved <= most else own * most // self._reserved

    def names(self) -> Iterator[tuple[str, str]]:
        """(salt, tenant) of every tenant that the pool knows an adapter of."""
        return ((salt, tenant.name) for salt, tenant in self._tenants.items())


class TierBytes:
    """Who holds how much of one tier."""

    def __init__(self, capacity: int, promises: ResidentPromises) -> None:
        self._capacity = capacity
        self._promises = promises
        self._held: Counter[str] = Counter()

    def held(self, salt: str) -> int:
        return self._held[salt]

    def take(self, salt: str, nbytes: int) -> None:
        self._held[salt] += nbytes

    def give(self, salt: str, nbytes: int) -> None:
        self._held[salt] -= nbytes
        if not self._held[salt]:
            del self._held[salt]

    def over(self, salt: str, nbytes: int) -> int:
        """Bytes that the tenant must give up before `nbytes` more lie within its limit."""
        most = self._promises.of(salt).most
        return 0 if most is None else max(0, self._held[salt] + nbytes - most)

    def keeps(self, salt: str, gone: int = 0) -> bool:
        """Whether others cannot have its adapters' place; `gone`: bytes that leave already."""
        held = self._held[salt] - gone
        return 0 < held <= self._promises.reserved(salt, self._capacity)
