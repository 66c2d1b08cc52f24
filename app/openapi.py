"""The OpenAPI document of both APIs: FastAPI's, with the credentials and the errors that every
operation shares."""

from typing import Any

from fastapi import FastAPI

API_PREFIXES = ("/v1/", "/admin/v1/")
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "description": "What was wrong, and what to do."},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field that was wrong."},
                "code": {"type": "string", "description": "Stable; clients may decide by it."},
            },
        }
    },
}
REFUSALS = {
    "400": "The call cannot be honoured as it was sent; `param` names the field.",
    "401": "No key, or one that is unknown, revoked or expired.",
    "403": "The key may not do this.",
    "404": "There is no such thing, or it is another tenant's.",
    "409": "It contradicts the state of things; the message says which.",
    "411": "A body must say its length or come in chunks.",
    "413": "The body is larger than the setting that the message names.",
    "415": "The body is of another content type than the call takes.",
    "422": "A value is of the wrong type or out of bounds; `param` names the field.",
    "429": "A limit is reached; `Retry-After` says when to try again.",
    "500": "A fault of the server; `x-request-id` finds it in its logs.",
    "503": "It cannot be done now; `Retry-After` says when to try again.",
}


def document(app: FastAPI) -> dict[str, Any]:
    """The whole document; made once and kept, as FastAPI keeps its own."""
    known: dict[str, Any] | None = getattr(app.state, "openapi", None)
    if known is None:
        known = app.state.openapi = _complete(app.openapi())
    return known


def _complete(schema: dict[str, Any]) -> dict[str, Any]:
    components = schema.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    schemas["Error"] = ERROR
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)  # a 422 has the shape of every other error here
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in schema["paths"].items():
        if path.startswith(API_PREFIXES):
            for operation in operations.values():
                operation["security"] = [{"key": []}]
                operation["responses"] = operation["responses"] | _refusals()
    return schema


def _refusals() -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        status: {"description": about, "content": content} for status, about in REFUSALS.items()
    }
