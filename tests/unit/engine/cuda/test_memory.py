"""The device's memory is divided once, in bytes, and the arena gets what is left."""

from dataclasses import replace

import pytest

from engine.cuda.memory import DeviceMemoryTooSmall, MemoryBudget

MIB = 1 << 20
BUDGET = MemoryBudget(
    total=1000 * MIB, share=0.9, others=50 * MIB, weights=300 * MIB, buffers=20 * MIB,
    step=30 * MIB, graphs=40 * MIB, extent=7 * MIB,
)  # fmt: skip


def test_the_arena_is_what_the_share_leaves_in_whole_extents() -> None:
    left = 900 - 50 - 300 - 20 - 30 - 40 - 18
    assert BUDGET.extents == left // 7
    assert BUDGET.arena == left // 7 * 7 * MIB


@pytest.mark.parametrize("part", ["others", "weights", "buffers", "step", "graphs"])
def test_every_part_takes_from_the_arena(part: str) -> None:
    more = replace(BUDGET, **{part: getattr(BUDGET, part) + 70 * MIB})
    assert BUDGET.extents - more.extents == 10


def test_all_parts_together_stay_within_the_share() -> None:
    parts = (BUDGET.others, BUDGET.weights, BUDGET.buffers, BUDGET.step, BUDGET.graphs)
    assert sum(parts) + BUDGET.slack + BUDGET.arena <= BUDGET.limit


def test_too_little_memory_is_refused_with_the_figures_and_what_to_do() -> None:
    with pytest.raises(DeviceMemoryTooSmall, match=r"weights 870 MiB.*Lower max_batch_tokens"):
        _ = replace(BUDGET, weights=870 * MIB).extents


def test_the_table_has_a_line_for_each_part_and_the_sum() -> None:
    lines = BUDGET.table()
    assert any(line.startswith("weights") and "300.0" in line and "30.0%" in line for line in lines)
    assert lines[-2].startswith("used of the share")
    assert lines[-1].split()[-2:] == ["900.0", "90.0%"]
