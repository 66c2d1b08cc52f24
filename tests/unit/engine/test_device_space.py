"""Where adapters lie while one of them is kept a window that has still to be left."""

from engine.adapters.device_space import DeviceSpace
from engine.adapters.resident_bytes import ResidentPromises, TierBytes
from engine.arena import Arena
from engine.kv_blocks import KvBlocks
from engine.types import AdapterRef
from tests.fakes import EXTENT_BYTES, FakeExecutor

EXTENTS = 30
OLDEST, HOLDING, LATE = (AdapterRef("aa", name) for name in ("oldest", "holding", "late"))


def space_of(blocks: KvBlocks, arena: Arena) -> DeviceSpace:
    """Requests wait for all three adapters, in this order."""
    order = {OLDEST: (0, 0), HOLDING: (1, 0), LATE: (2, 0)}
    return DeviceSpace(
        arena,
        blocks,
        FakeExecutor(EXTENTS),
        max_slots=8,
        max_extents=EXTENTS,
        tenants=TierBytes(EXTENTS * EXTENT_BYTES, ResidentPromises()),
        order_of=order.get,
        on_evicted=lambda _: None,
        on_spared=lambda _: None,
    )


def test_a_block_in_use_inside_the_hold_keeps_others_from_a_place_below_it() -> None:
    arena = Arena(EXTENTS)
    blocks = KvBlocks(arena)
    space = space_of(blocks, arena)
    taken = blocks.take(20)
    assert taken is not None
    assert space.place(OLDEST, 8, 8 * EXTENT_BYTES, 0) is not None
    assert space.begin_hold(HOLDING, 3, 3 * EXTENT_BYTES)
    inside = taken[19:]
    assert arena.held is not None
    assert arena.held.first == inside[0]
    blocks.release(taken[5:19])
    assert space.place(LATE, 2, 2 * EXTENT_BYTES, 0) is None
    blocks.release(inside)
    late = space.place(LATE, 2, 2 * EXTENT_BYTES, 0)
    assert late is not None
    assert space.span_of(late).end == arena.held.first
