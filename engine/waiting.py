"""What waits, in the order of the policy: per tenant by arrival, tenants by what they were served.

Every operation is O(log waiting): thousands may wait while a step takes milliseconds.
"""

import heapq
import itertools
from typing import Any, Generic, Protocol, TypeVar


class Waiter(Protocol):
    """Something that waits. `order` is its place in the order of arrival, unique."""

    @property
    def order(self) -> tuple[int, int]: ...

    @property
    def tenant(self) -> str: ...

    @property
    def arrival_ms(self) -> float: ...


class Priorities(Protocol):
    def priority(self, tenant: str) -> float:
        """Lower is served first; never falls while the tenant has something waiting."""
        ...


T = TypeVar("T")
W = TypeVar("W", bound=Waiter)


class LazyHeap(Generic[T]):
    """A heap whose items can be removed by key; what was removed is skipped later."""

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, T]] = []
        self._items: dict[Any, T] = {}
        self._pushes = itertools.count()  # breaks ties, so that items are never compared

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: Any) -> T | None:
        return self._items.get(key)

    def push(self, key: Any, item: T) -> None:
        """Adds an item; `key` sorts and is unique among those in the heap."""
        self._items[key] = item
        heapq.heappush(self._heap, (key, next(self._pushes), item))

    def remove(self, key: Any) -> bool:
        """Whether an item of this key was there."""
        if self._items.pop(key, None) is None:
            return False
        if len(self._heap) > 2 * len(self._items) + 16:
            self._heap = [(key, next(self._pushes), item) for key, item in self._items.items()]
            heapq.heapify(self._heap)
        return True

    def peek(self) -> T | None:
        """The item of the least key."""
        while self._heap:
            key, _, item = self._heap[0]
            if self._items.get(key) is item:
                return item
            heapq.heappop(self._heap)
        return None


class FairQueue(Generic[W]):
    """Waiters of many tenants; `peek` is the policy's choice, `oldest` the longest waiting."""

    def __init__(self, priorities: Priorities) -> None:
        self._priorities = priorities
        self._by_tenant: dict[str, LazyHeap[W]] = {}
        self._by_age: LazyHeap[W] = LazyHeap()
        self._tenants: list[
            tuple[float, tuple[int, int], str]
        ] = []  # (priority, order of its head, tenant)
        self._entry: dict[
            str, tuple[float, tuple[int, int], str]
        ] = {}  # the valid one of each tenant

    def __len__(self) -> int:
        return len(self._by_age)

    def push(self, waiter: W) -> None:
        """Adds a waiter; one that is here already stays as it is."""
        if self._by_age.get(waiter.order) is waiter:
            return
        tenant = waiter.tenant
        queue = self._by_tenant.setdefault(tenant, LazyHeap())
        queue.push(waiter.order, waiter)
        self._by_age.push(waiter.order, waiter)
        if queue.peek() is waiter:
            self._enter(tenant, waiter.order)

    def remove(self, waiter: W) -> bool:
        """Takes a waiter out, wherever it stands; whether it was there."""
        if self._by_age.get(waiter.order) is not waiter:
            return False
        self._by_age.remove(waiter.order)
        queue = self._by_tenant[waiter.tenant]
        queue.remove(waiter.order)
        if not queue:
            del self._by_tenant[waiter.tenant]
            self._entry.pop(waiter.tenant, None)
        return True

    def oldest(self) -> W | None:
        return self._by_age.peek()

    def peek(self) -> W | None:
        """The first waiter of the tenant that comes first."""
        while self._tenants:
            entry = self._tenants[0]
            tenant = entry[2]
            if self._entry.get(tenant) != entry:
                heapq.heappop(self._tenants)
                continue
            head = self._by_tenant[tenant].peek()
            if head is None:
                raise AssertionError("a tenant without waiters has an entry")
            current = (self._priorities.priority(tenant), head.order, tenant)
            if current == entry:
                return head
            self._entry[tenant] = current
            heapq.heapreplace(self._tenants, current)
        return None

    def _enter(self, tenant: str, head_order: tuple[int, int]) -> None:
        entry = (self._priorities.priority(tenant), head_order, tenant)
        if self._entry.get(tenant) == entry:
            return
        self._entry[tenant] = entry
        heapq.heappush(self._tenants, entry)
        if len(self._tenants) > 2 * len(self._entry) + 16:
            self._tenants = list(self._entry.values())
            heapq.heapify(self._tenants)
