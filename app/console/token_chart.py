"""Tokens over time, as a chart of every bucket of a span."""

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Protocol

from app.console.charts import Chart, bar_chart
from app.usage.spans import EPOCH, Bucket, month_starts

STEPS = {
    "minute": (timedelta(minutes=1), "%H:%M UTC"),
    "hour": (timedelta(hours=1), "%b %d %H:00 UTC"),
    "day": (timedelta(days=1), "%b %d"),
}


class Tokens(Protocol):
    """Those of one bucket."""

    @property
    def start(self) -> datetime: ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def completion_tokens(self) -> int: ...


def tokens_chart(rows: Sequence[Tokens], start: datetime, end: datetime, bucket: Bucket) -> Chart:
    """Prompt and answer tokens of every bucket of the span, also of those without any.

    `rows`: an ungrouped report by `bucket`.
    """
    found = {row.start: row for row in rows}
    columns = []
    for at, label in _starts(start, end, bucket):
        row = found.get(at)
        prompt, answer = (row.prompt_tokens, row.completion_tokens) if row is not None else (0, 0)
        columns.append((label, (("prompt", prompt), ("answer", answer))))
    return bar_chart(columns, unit=" tokens")


def _starts(start: datetime, end: datetime, bucket: Bucket) -> Iterator[tuple[datetime, str]]:
    """Beginning and label of every bucket of the span."""
    if bucket == "month":
        yield from ((at, at.strftime("%b %Y")) for at in month_starts(start, end))
        return
    step, form = STEPS[bucket]
    at = EPOCH + (start - EPOCH) // step * step
    while at <= end:
        yield at, at.strftime(form)
        at += step
