"""The query parameters that /v1/usage, its export and the operator's both share."""

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

from fastapi import Depends, Query

from app.usage.report import MAX_LINES, parse_group_by
from app.usage.spans import Bucket

NO_NUL = r"^[^\x00]*$"  # PostgreSQL has no text with it
Id = Annotated[str | None, Query(max_length=40, pattern=NO_NUL)]


@dataclass(frozen=True, slots=True)
class UsageParameters:
    """What to add up, as keyword arguments of `report.report`."""

    options: dict[str, Any]


async def _parameters(
    start: Annotated[datetime | None, Query(description="Default: 30 days ago")] = None,
    end: Annotated[datetime | None, Query(description="Default: now")] = None,
    bucket: Bucket = "day",
    group_by: Annotated[
        list[str],
        Query(description="key, adapter, model; several by commas (operators: tenant too)"),
    ] = [],  # noqa: B006
    key_id: Id = None,
    adapter_id: Id = None,
    model: Annotated[str | None, Query(max_length=200, pattern=NO_NUL)] = None,
) -> UsageParameters:
    return UsageParameters(
        {
            "start": start,
            "end": end,
            "bucket": bucket,
            "group_by": parse_group_by(group_by),
            "key_id": key_id,
            "adapter_id": adapter_id,
            "model": model,
        }
    )


UsageParametersDep = Annotated[UsageParameters, Depends(_parameters)]
Cursor = Annotated[
    str | None, Query(max_length=1000, description="`next` of the page before this one")
]
Lines = Annotated[int, Query(ge=1, le=MAX_LINES)]
