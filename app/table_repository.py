"""The SQL that every table shares: the repositories of the domains say what is searched."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Select, SQLColumnExpression, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.errors import InvalidRequest
from app.tables import Table, TableQuery

MAX_SEARCH = 100
MAX_OFFSET = 1_000_000
Column = SQLColumnExpression[Any]


async def read_table(
    session: AsyncSession,
    query: Select[*tuple[Any, ...]],
    wanted: TableQuery,
    *,
    searched: Sequence[Column],
    sorted_by: Mapping[str, Column],
    default: str,
) -> Table[Any]:
    """Runs the query of a repository. Rows are as the query selects them.

    `default` is the sorting when none is wanted. Ties go by the default's column, so that pages
    neither repeat nor lose a row when it is unique. Raises InvalidRequest for an unknown column.
    """
    words = wanted.search.strip()[:MAX_SEARCH]
    if words:
        query = query.where(or_(*(column.icontains(words, autoescape=True) for column in searched)))
    total = await session.scalar(select(func.count()).select_from(query.subquery()))
    page = (
        query.order_by(*_order(wanted.sort or default, default, sorted_by))
        .limit(wanted.limit)
        .offset(min(wanted.offset, MAX_OFFSET))
    )
    return Table([tuple(row) for row in await session.execute(page)], total or 0)


def _order(sort: str, default: str, columns: Mapping[str, Column]) -> list[ColumnElement[Any]]:
    order: list[ColumnElement[Any]] = []
    for name in dict.fromkeys((sort, default)):
        column = columns.get(name.removeprefix("-"))
        if column is None:
            raise InvalidRequest(
                f"{name[:40]!r} is no column to sort by; choose {', '.join(sorted(columns))}, "
                "with - before it for the other way round.",
                param="sort",
            )
        direction = column.desc() if name.startswith("-") else column.asc()
        order.append(direction.nulls_last())
    return order
