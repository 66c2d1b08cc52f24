"""Bar charts as plain SVG: no script draws them, and a table beside them says the same."""

from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 720, 160
_GAP = 0.25  # of a bar's slot
_TICKS = 4


@dataclass(frozen=True, slots=True)
class Bar:
    """One stacked bar. Lengths are SVG units; `top` of each part counts from the chart's top."""

    label: str
    title: str
    x: float
    width: float
    parts: tuple[tuple[str, float, float], ...]  # (class, top, height)


@dataclass(frozen=True, slots=True)
class Tick:
    y: float
    label: str


@dataclass(frozen=True, slots=True)
class Chart:
    bars: tuple[Bar, ...]
    ticks: tuple[Tick, ...]
    width: int = WIDTH
    height: int = HEIGHT


def bar_chart(
    columns: Sequence[tuple[str, Sequence[tuple[str, float]]]], *, unit: str = ""
) -> Chart:
    """`columns`: (label, parts from the bottom up as (class, value >= 0))."""
    totals = [sum(value for _, value in parts) for _, parts in columns]
    top = _round_up(max(totals, default=0.0))
    slot = WIDTH / max(1, len(columns))
    bars = []
    for index, ((label, parts), total) in enumerate(zip(columns, totals, strict=True)):
        y, drawn = float(HEIGHT), []
        for name, value in parts:
            height = HEIGHT * value / top
            y -= height
            drawn.append((name, round(y, 2), round(height, 2)))
        bars.append(
            Bar(
                label=label,
                title=f"{label}: {grouped(total)}{unit}",
                x=round(index * slot + slot * _GAP / 2, 2),
                width=round(slot * (1 - _GAP), 2),
                parts=tuple(drawn),
            )
        )
    ticks = tuple(
        Tick(HEIGHT * (1 - step / _TICKS), short(top * step / _TICKS)) for step in range(_TICKS + 1)
    )
    return Chart(tuple(bars), ticks)


def grouped(value: float) -> str:
    """12,345 or 0.5."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.3g}"


def short(value: float) -> str:
    """1.2k, 3M: for the axis."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 8 times a power of ten, so that quarters are short numbers."""
    if value <= 0:
        return 1.0
    power = 1.0
    while power * 8 < value:
        power *= 10
    while power / 10 * 8 >= value:
        power /= 10
    return next(step * power for step in (1.0, 2.0, 4.0, 8.0) if step * power >= value)
