import math
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from engine.policy import VirtualTokenCounter
from engine.waiting import FairQueue, LazyHeap

LEAD = 10.0


@dataclass(eq=False)
class Item:
    order: tuple[int, int]
    tenant: str
    arrival_ms: float = 0.0
    turn_ms: float = 0.0
    urgent_ms: float = math.inf
    lost_ms: float = math.inf

    def give_up_hurry(self) -> None:
        self.turn_ms = 1e9
        self.urgent_ms = math.inf


class Served:
    """What each tenant was served, set by the test."""

    def __init__(self) -> None:
        self.by_tenant: dict[str, float] = {}

    def priority(self, tenant: str) -> float:
        return self.by_tenant.get(tenant, 0.0)

    def lead(self, tenant: str) -> float:
        return LEAD


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


class TestUrgency:
    def queue(self, *items: Item, served: Served | None = None) -> FairQueue[Item]:
        queue: FairQueue[Item] = FairQueue(served or Served())
        for item in items:
            queue.push(item)
        return queue

    def test_nobody_is_urgent_before_its_time(self) -> None:
        hurried = Item((1, 0), "b", urgent_ms=50.0)
        queue = self.queue(Item((0, 0), "a"), hurried)
        assert queue.urgent(49.0) is None
        assert queue.urgent(50.0) is hurried

    def test_the_one_urgent_longest_comes_first(self) -> None:
        late, early = Item((0, 0), "a", urgent_ms=20.0), Item((1, 0), "b", urgent_ms=10.0)
        queue = self.queue(late, early)
        assert queue.urgent(30.0) is early
        queue.remove(early)
        assert queue.urgent(30.0) is late

    def test_a_tenant_too_far_ahead_waits_until_the_rest_has_caught_up(self) -> None:
        served = Served()
        served.by_tenant = {"greedy": 11.0, "modest": 0.0}
        hurried = Item((0, 0), "greedy", urgent_ms=0.0)
        queue = self.queue(hurried, Item((1, 0), "modest"), served=served)
        assert queue.urgent(5.0) is None
        served.by_tenant["modest"] = 1.0
        assert queue.urgent(5.0) is hurried

    def test_one_that_is_too_late_makes_way_for_those_that_are_not(self) -> None:
        lost = Item((0, 0), "a", urgent_ms=0.0, lost_ms=10.0)
        hurried = Item((1, 0), "a", turn_ms=5.0, urgent_ms=5.0, lost_ms=100.0)
        queue = self.queue(lost, hurried)
        assert queue.urgent(9.0) is lost
        assert queue.urgent(10.0) is hurried
        queue.remove(hurried)
        assert queue.urgent(20.0) is None
        assert queue.peek() is lost

    @given(
        st.lists(
            st.tuples(
                st.sampled_from(["push", "take", "remove", "serve", "wait"]),
                st.integers(0, 40),
                st.sampled_from("abcd"),
            ),
            max_size=120,
        )
    )
    def test_the_choice_is_that_of_looking_at_everybody(
        self, trace: list[tuple[str, int, str]]
    ) -> None:
        served, now_ms = Served(), 0.0
        queue = self.queue(served=served)
        inside: dict[tuple[int, int], Item] = {}
        for action, number, tenant in trace:
            if action == "push" and (number, 0) not in inside:
                urgent_ms = math.inf if number % 3 == 0 else now_ms + number
                item = Item((number, 0), tenant, turn_ms=now_ms, urgent_ms=urgent_ms)
                inside[number, 0] = item
                queue.push(item)
            elif action == "take" and (first := queue.urgent(now_ms)) is not None:
                queue.remove(inside.pop(first.order))
            elif action == "remove" and (number, 0) in inside:
                queue.remove(inside.pop((number, 0)))
            elif action == "serve":
                served.by_tenant[tenant] = served.priority(tenant) + number
            elif action == "wait":
                now_ms += number
            heads: dict[str, Item] = {}
            for item in sorted(inside.values(), key=lambda item: (item.turn_ms, item.order)):
                heads.setdefault(item.tenant, item)
            least = min((served.priority(t) for t in heads), default=0.0)
            allowed = [
                item.urgent_ms
                for item in heads.values()
                if item.urgent_ms <= now_ms and served.priority(item.tenant) - LEAD <= least
            ]
            chosen = queue.urgent(now_ms)
            assert (chosen is None) == (not allowed)
            assert chosen is None or chosen.urgent_ms == min(allowed)
            assert len(queue._pressing) <= 40
