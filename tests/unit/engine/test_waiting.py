from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from engine.policy import VirtualTokenCounter
from engine.waiting import FairQueue, LazyHeap


@dataclass(eq=False)
class Item:
    order: tuple[int, int]
    tenant: str
    arrival_ms: float = 0.0


class Served:
    """What each tenant was served, set by the test."""

    def __init__(self) -> None:
        self.by_tenant: dict[str, float] = {}

    def priority(self, tenant: str) -> float:
        return self.by_tenant.get(tenant, 0.0)


def test_a_removed_item_is_never_seen_again() -> None:
    heap: LazyHeap[str] = LazyHeap()
    for key, item in ((2, "two"), (1, "one"), (3, "three")):
        heap.push(key, item)
    assert heap.remove(1)
    assert not heap.remove(1)
    assert (heap.peek(), len(heap)) == ("two", 2)


def test_the_tenant_served_least_comes_first_and_within_it_the_first_to_arrive() -> None:
    served = Served()
    queue: FairQueue[Item] = FairQueue(served)
    items = [Item((n, 0), tenant) for n, tenant in enumerate("aab")]
    for item in items:
        queue.push(item)
    assert queue.peek() is items[0]
    served.by_tenant["a"] = 5.0
    assert queue.peek() is items[2]
    assert queue.oldest() is items[0]


def test_one_that_comes_back_takes_its_old_place() -> None:
    queue: FairQueue[Item] = FairQueue(Served())
    first, second = Item((0, 0), "a"), Item((1, 0), "a")
    queue.push(second)
    queue.push(first)
    assert queue.peek() is first


def test_another_item_of_the_same_place_is_not_removed() -> None:
    queue: FairQueue[Item] = FairQueue(Served())
    queue.push(Item((0, 0), "a"))
    assert not queue.remove(Item((0, 0), "b"))
    assert len(queue) == 1


def test_the_queue_does_not_grow_with_what_has_left_it() -> None:
    queue: FairQueue[Item] = FairQueue(Served())
    queue.push(Item((0, 0), "a"))
    for n in range(1, 5000):
        item = Item((n, 0), "a" if n % 2 else "b")
        queue.push(item)
        queue.remove(item)
    assert len(queue._by_age._heap) < 50
    assert len(queue._tenants) < 50


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["push", "take", "remove", "serve"]),
            st.integers(0, 40),
            st.sampled_from("abc"),
        ),
        max_size=120,
    )
)
def test_the_order_is_that_of_a_full_sort(trace: list[tuple[str, int, str]]) -> None:
    served = Served()
    queue: FairQueue[Item] = FairQueue(served)
    inside: dict[tuple[int, int], Item] = {}
    for action, number, tenant in trace:
        if action == "push" and (number, 0) not in inside:
            inside[number, 0] = Item((number, 0), tenant)
            queue.push(inside[number, 0])
        elif action == "take" and (first := queue.peek()) is not None:
            queue.remove(first)
            del inside[first.order]
        elif action == "remove" and (number, 0) in inside:
            assert queue.remove(inside.pop((number, 0)))
        elif action == "serve":
            served.by_tenant[tenant] = served.priority(tenant) + number
        heads = {}
        for item in sorted(inside.values(), key=lambda item: item.order):
            heads.setdefault(item.tenant, item)
        ranked = sorted(heads.values(), key=lambda i: (served.priority(i.tenant), i.order))
        assert queue.peek() is (ranked[0] if ranked else None)
        assert queue.oldest() is (inside[min(inside)] if inside else None)
        assert len(queue) == len(inside)


def test_thousands_of_tenants_that_come_and_go_leave_no_trace() -> None:
    policy = VirtualTokenCounter()
    queue: FairQueue[Item] = FairQueue(policy)
    for n in range(3000):
        item = Item((n, 0), f"tenant-{n}")
        policy.activate(item.tenant)
        queue.push(item)
        policy.admitted(item.tenant)
        queue.remove(item)
        policy.charge(item.tenant, 1.0, 10.0)
        policy.deactivate(item.tenant)
        policy.activate("always here")
        policy.charge("always here", 1.0, 20.0)
        policy.admitted("always here")
    assert len(policy) < 50
    assert len(queue._by_tenant) == 0
