"""Rows as CSV, the same in every export.

Times are ISO 8601 in UTC. A text that a spreadsheet would run as a formula gets an apostrophe in
front: names are the tenants' own words.
"""

import csv
import io
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def cell(value: object) -> object:
    """One value as it is written."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if isinstance(value, list):
        value = " ".join(map(str, value))
    if isinstance(value, str) and value.startswith(FORMULA):
        return "'" + value
    return "" if value is None else value


def lines(rows: Iterable[Sequence[object]]) -> bytes:
    """Rows as CSV (RFC 4180: commas, CRLF)."""
    text = io.StringIO()
    csv.writer(text).writerows([cell(value) for value in row] for row in rows)
    return text.getvalue().encode()
