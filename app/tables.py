"""Lists as tables show them: searched, sorted by a column, cut into pages with a total.

The API's own lists go by id (`app.paging`), which stays stable while rows come and go.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class TableQuery:
    """`search` is any part of what the table shows; `sort` a column, `-column` for descending."""

    search: str = ""
    sort: str = ""
    limit: int = 50
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Table(Generic[Row]):
    """One page, and how many rows all pages have."""

    rows: Sequence[Row]
    total: int
