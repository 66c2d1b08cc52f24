"""What a page with a table is asked for: search words, a sorting, a page; and links to the rest."""

from dataclasses import dataclass, field
from typing import Annotated
from urllib.parse import urlencode

from fastapi import Query

from app.tables import TableQuery

PAGE = 50

Search = Annotated[str, Query(max_length=100, pattern=r"^[^\x00]*$")]
Sort = Annotated[str, Query(max_length=40)]
PageNumber = Annotated[int, Query(ge=1, le=20_000)]


@dataclass(frozen=True, slots=True)
class TableView:
    """One page of a table as its address says. `kept`: other parts of the address."""

    path: str
    q: str = ""
    sort: str = ""
    page: int = 1
    kept: dict[str, str] = field(default_factory=dict)
    total: int = 0

    @property
    def wanted(self) -> TableQuery:
        return TableQuery(
            search=self.q.strip(), sort=self.sort, limit=PAGE, offset=(self.page - 1) * PAGE
        )

    def href(self, *, sort: str | None = None, page: int = 1) -> str:
        """The same table, sorted otherwise or on another page."""
        parts = {
            "q": self.q.strip(),
            **self.kept,
            "sort": self.sort if sort is None else sort,
            "page": str(page) if page > 1 else "",
        }
        query = urlencode({name: value for name, value in parts.items() if value})
        return f"{self.path}?{query}" if query else self.path

    def order(self, column: str) -> str:
        """`ascending`, `descending` or `none`, as aria-sort says it."""
        return {column: "ascending", f"-{column}": "descending"}.get(self.sort, "none")

    def reorder(self, column: str) -> str:
        """The address that sorts by a column, or turns it round."""
        return self.href(sort=f"-{column}" if self.sort == column else column)

    @property
    def first(self) -> int:
        return (self.page - 1) * PAGE + 1

    @property
    def last(self) -> int:
        return min(self.page * PAGE, self.total)

    @property
    def before(self) -> str | None:
        return self.href(page=self.page - 1) if self.page > 1 else None

    @property
    def after(self) -> str | None:
        return self.href(page=self.page + 1) if self.last < self.total else None

    @property
    def narrowed(self) -> bool:
        """Whether a search or a filter leaves something out."""
        return bool(self.q.strip() or any(self.kept.values()))
