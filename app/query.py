"""Query parameters that a route does not have are refused, as unknown fields of a body are."""

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from app.errors import InvalidRequest
from app.openapi import API_PREFIXES

LONGEST_NAME = 40


async def refuse_unknown_parameters(request: Request) -> None:
    """A dependency of every route; looks at those of both APIs. Raises InvalidRequest."""
    if not request.scope["query_string"] or not request.url.path.startswith(API_PREFIXES):
        return
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    known = _names(route.dependant)
    for name in request.query_params:
        if name not in known:
            shown = name[:LONGEST_NAME]
            raise InvalidRequest(
                f"`{shown}` is not a parameter here; remove it. {_there_are(known)}",
                code="unknown_parameter",
                param=shown,
            )


def _there_are(known: set[str]) -> str:
    return f"There are: {', '.join(sorted(known))}." if known else "There are none."


def _names(dependant: Dependant) -> set[str]:
    """Those of the endpoint and of all that it depends on."""
    names = {field.alias for field in dependant.query_params}
    return names.union(*(_names(inner) for inner in dependant.dependencies))
