"""What waits, in the order of the policy: per tenant by arrival, tenants by what they were served.

Every operation is O(log waiting): thousands may wait while a step takes milliseconds.
"""

import heapq
import itertools
import math
from typing import Any, Generic, Protocol, TypeVar


class Waiter(Protocol):
    """Something that waits. `order` is its place in the order of arrival, unique."""

    @property
    def order(self) -> tuple[int, int]: ...

    @property
    def tenant(self) -> str: ...

    @property
    def arrival_ms(self) -> float: ...

    @property
    def turn_ms(self) -> float:
        """Its place among its tenant's waiters; equal ones go by arrival."""
        ...

    @property
    def urgent_ms(self) -> float:
        """From when on it may go before its tenant's turn; infinite: never."""
        ...

    @property
    def lost_ms(self) -> float:
        """From when on hurry is of no use any more."""
        ...

    def give_up_hurry(self) -> None:
        """Takes the place of one without a budget; never urgent from now on."""
        ...


class Priorities(Protocol):
    def priority(self, tenant: str) -> float:
        """Lower is served first; never falls while the tenant has something waiting."""
        ...

    def lead(self, tenant: str) -> float:
        """How far above the least priority the tenant may be and still go first when urgent."""
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


Key = tuple[float, tuple[int, int]]
"""A waiter's place among its tenant's: its turn, then its arrival."""


class FairQueue(Generic[W]):
    """Waiters of many tenants.

    peek     the first waiter of the tenant that comes first by the policy
    urgent   the one whose time runs out, of a tenant that is not too far ahead
    next     the urgent one where the policy knows hurry, else the first
    oldest   the longest waiting
    """

    def __init__(self, priorities: Priorities) -> None:
        self._priorities = priorities
        self._by_tenant: dict[str, LazyHeap[W]] = {}
        self._by_age: LazyHeap[W] = LazyHeap()
        self._keys: dict[tuple[int, int], Key] = {}  # under which a waiter was put
        self._tenants: list[tuple[float, Key, str]] = []  # heap: (priority, key of its head, name)
        self._entry: dict[str, tuple[float, Key, str]] = {}  # the valid one of each tenant
        self._pressing: list[tuple[float, str]] = []  # heap: (when its head becomes urgent, name)
        self._pressed: dict[str, float] = {}  # the valid one of each tenant
        self._ahead: list[tuple[float, str]] = []  # heap: those too far ahead, and until when
        self._is_ahead: set[str] = set()

    def __len__(self) -> int:
        return len(self._by_age)

    def push(self, waiter: W) -> None:
        """Adds a waiter; one that is here already stays as it is."""
        if self._by_age.get(waiter.order) is waiter:
            return
        key = (waiter.turn_ms, waiter.order)
        tenant = waiter.tenant
        queue = self._by_tenant.setdefault(tenant, LazyHeap())
        queue.push(key, waiter)
        self._keys[waiter.order] = key
        self._by_age.push(waiter.order, waiter)
        if queue.peek() is waiter:
            self._enter(tenant, key)
            self._press(tenant, waiter)

    def remove(self, waiter: W) -> bool:
        """Takes a waiter out, wherever it stands; whether it was there."""
        if self._by_age.get(waiter.order) is not waiter:
            return False
        self._by_age.remove(waiter.order)
        queue = self._by_tenant[waiter.tenant]
        was_head = queue.peek() is waiter
        queue.remove(self._keys.pop(waiter.order))
        if not queue:
            del self._by_tenant[waiter.tenant]
            self._entry.pop(waiter.tenant, None)
            self._pressed.pop(waiter.tenant, None)
        elif was_head and (head := queue.peek()) is not None:
            self._press(waiter.tenant, head)
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
            current = (self._priorities.priority(tenant), self._keys[head.order], tenant)
            if current == entry:
                return head
            self._entry[tenant] = current
            heapq.heapreplace(self._tenants, current)
        return None

    def urgent(self, now_ms: float) -> W | None:
        """The waiter that has been urgent longest, or None: then `peek` says who is next."""
        if self.peek() is None:
            return None
        least = self._tenants[0][0]
        while self._ahead and self._ahead[0][0] <= least:
            _, tenant = heapq.heappop(self._ahead)
            self._is_ahead.discard(tenant)
            if (head := self._head(tenant)) is not None:
                self._press(tenant, head)
        while self._pressing and self._pressing[0][0] <= now_ms:
            when_ms, tenant = self._pressing[0]
            head = self._head(tenant)
            if head is None or self._pressed.get(tenant) != when_ms:
                heapq.heappop(self._pressing)
                continue
            if head.lost_ms <= now_ms:
                self._again(head)
                continue
            floor = self._priorities.priority(tenant) - self._priorities.lead(tenant)
            if floor <= least:
                return head
            heapq.heappop(self._pressing)
            del self._pressed[tenant]
            heapq.heappush(self._ahead, (floor, tenant))
            self._is_ahead.add(tenant)
        return None

    def next(self, now_ms: float, *, hurries: bool) -> W | None:
        """Whose turn it is. `hurries`: whether one whose time runs out goes first."""
        if hurries and (urgent := self.urgent(now_ms)) is not None:
            return urgent
        return self.peek()

    def _head(self, tenant: str) -> W | None:
        queue = self._by_tenant.get(tenant)
        return None if queue is None else queue.peek()

    def _again(self, waiter: W) -> None:
        """Its time is over: it goes to the place that it has without hurry."""
        self.remove(waiter)
        waiter.give_up_hurry()
        self.push(waiter)

    def _press(self, tenant: str, head: W) -> None:
        """The head of a tenant's waiters is another one now."""
        if head.urgent_ms == math.inf or tenant in self._is_ahead:
            self._pressed.pop(tenant, None)
        elif self._pressed.get(tenant) != head.urgent_ms:
            self._pressed[tenant] = head.urgent_ms
            heapq.heappush(self._pressing, (head.urgent_ms, tenant))
            if len(self._pressing) > 2 * len(self._pressed) + 16:
                self._pressing = [(when_ms, name) for name, when_ms in self._pressed.items()]
                heapq.heapify(self._pressing)

    def _enter(self, tenant: str, head: Key) -> None:
        entry = (self._priorities.priority(tenant), head, tenant)
        if self._entry.get(tenant) == entry:
            return
        self._entry[tenant] = entry
        heapq.heappush(self._tenants, entry)
        if len(self._tenants) > 2 * len(self._entry) + 16:
            self._tenants = list(self._entry.values())
            heapq.heapify(self._tenants)
