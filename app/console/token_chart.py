"""Tokens over time, as a chart of every bucket of a span."""

from collections.abc import Iterator
from datetime import datetime, timedelta

from app.console.charts import Chart, bar_chart
from app.usage.schemas import UsageBucket
from app.usage.spans import EPOCH, Bucket, month_starts

STEPS = {
    "minute": (timedelta(minutes=1), "%H:%M UTC"),
    "hour": (timedelta(hours=1), "%b %d %H:00 UTC"),
    "day": (timedelta(days=1), "%b %d"),
}


def tokens_chart(rows: list[UsageBucket], start: datetime, end: datetime, bucket: Bucket) -> Chart:
    """Prompt and answer tokens of every bucket of the span, also of those without any."""
    sums: dict[datetime, tuple[int, int]] = {}
    for row in rows:
        prompt, answer = sums.get(row.start, (0, 0))
        sums[row.start] = (prompt + row.prompt_tokens, answer + row.completion_tokens)
    columns = []
    for at, label in _starts(start, end, bucket):
        prompt, answer = sums.get(at, (0, 0))
        columns.append((label, (("prompt", float(prompt)), ("answer", float(answer)))))
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
