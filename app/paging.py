"""Lists in pages, newest first: `?limit=&after=<last id>`, answered in OpenAI's list shape."""

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Depends, Query
from pydantic import BaseModel

DEFAULT_LIMIT = 50
MAX_LIMIT = 200


class Page(BaseModel):
    """One page's bounds. Ask the repository for `fetch` rows: the extra one tells of more."""

    limit: int
    after: str | None

    @property
    def fetch(self) -> int:
        return self.limit + 1


async def _page(
    limit: Annotated[int, Query(ge=1, le=MAX_LIMIT)] = DEFAULT_LIMIT,
    after: Annotated[str | None, Query(max_length=40, pattern=r"^[^\x00]*$")] = None,
) -> Page:
    return Page(limit=limit, after=after)


PageDep = Annotated[Page, Depends(_page)]


def list_body(page: Page, items: Sequence[BaseModel]) -> dict[str, Any]:
    """The list object; `items` may hold the extra row."""
    shown = [item.model_dump(mode="json") for item in items[: page.limit]]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(items) > page.limit,
    }
