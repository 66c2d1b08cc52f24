"""Charts without a script: geometry and labels."""

import pytest

from app.console.charts import HEIGHT, bar_chart, grouped, short


def test_parts_stand_on_one_another_and_the_largest_bar_fits() -> None:
    chart = bar_chart([("a", [("x", 30), ("y", 50)]), ("b", [("x", 20), ("y", 0)])], unit=" tokens")
    first, second = chart.bars
    assert [tick.label for tick in chart.ticks] == ["0", "20", "40", "60", "80"]
    assert first.title == "a: 80 tokens"
    (_, x_top, x_height), (_, y_top, y_height) = first.parts
    assert x_top + x_height == pytest.approx(HEIGHT)
    assert y_top + y_height == pytest.approx(x_top)
    assert y_top == pytest.approx(0)
    assert second.x > first.x + first.width


def test_nothing_at_all_is_an_empty_chart_with_an_axis() -> None:
    chart = bar_chart([("a", [("x", 0)]), ("b", [])])
    assert all(height == 0 for bar in chart.bars for _, _, height in bar.parts)
    assert chart.ticks[0].label == "0"


@pytest.mark.parametrize(
    ("value", "told", "on_the_axis"),
    [(0, "0", "0"), (1234, "1,234", "1.23k"), (4e6, "4,000,000", "4M"), (0.25, "0.25", "0.25")],
)
def test_numbers_are_short_on_the_axis_and_whole_in_the_tip(
    value: float, told: str, on_the_axis: str
) -> None:
    assert grouped(value) == told
    assert short(value) == on_the_axis
