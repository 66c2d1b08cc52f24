"""Calls made from the OpenAPI document: every operation, with a body that its schema takes.

The matrices walk these, so a new route is in them by being documented. What the schema cannot
tell (an id that is somebody's, a body with a rule of its own) is told in `Values`.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

SAFE = ("get", "head")
METHODS = (*SAFE, "post", "put", "patch", "delete")


@dataclass(frozen=True)
class Operation:
    method: str  # upper case
    path: str  # with its parameters in braces
    description: Mapping[str, Any] = field(repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def parameters(self) -> list[str]:
        return re.findall(r"\{(\w+)\}", self.path)

    @property
    def reads(self) -> bool:
        return self.method.lower() in SAFE


@dataclass(frozen=True)
class Values:
    """What fills a path's parameters, and bodies that a schema alone does not make."""

    parameters: Mapping[str, str] = field(default_factory=dict)
    bodies: Mapping[str, Any] = field(default_factory=dict)  # "PUT /v1/…" -> JSON


def operations(document: Mapping[str, Any], prefix: str) -> list[Operation]:
    """All of those below a prefix, in the document's order."""
    found = [
        Operation(method.upper(), path, description)
        for path, methods in document["paths"].items()
        if path.startswith(prefix)
        for method, description in methods.items()
        if method in METHODS
    ]
    assert found, f"the document has nothing below {prefix}"
    return found


async def call(
    client: httpx.AsyncClient,
    document: Mapping[str, Any],
    operation: Operation,
    values: Values,
    headers: Mapping[str, str],
) -> httpx.Response:
    """Sends it. Fails for a path parameter that nobody told a value of."""
    path = operation.path
    for name in operation.parameters:
        assert name in values.parameters, (
            f"{operation} has the parameter {name}, which the matrix has no value for: say in "
            "tests/security/test_tenant_matrix.py how a tenant gets one"
        )
        path = path.replace(f"{{{name}}}", values.parameters[name])
    content, kind = body_of(document, operation, values)
    sent = dict(headers)
    if kind is not None:
        sent["content-type"] = kind
    return await client.request(operation.method, path, content=content, headers=sent)


def body_of(
    document: Mapping[str, Any], operation: Operation, values: Values
) -> tuple[bytes | None, str | None]:
    """(bytes, content type) of the smallest body that the schema takes."""
    if str(operation) in values.bodies:
        return json.dumps(values.bodies[str(operation)]).encode(), "application/json"
    kinds = operation.description.get("requestBody", {}).get("content", {})
    if "application/json" in kinds:
        made = sample(document, kinds["application/json"].get("schema", {}))
        return json.dumps(made).encode(), "application/json"
    if "application/octet-stream" in kinds:
        return b"{}", "application/octet-stream"
    if "multipart/form-data" in kinds:
        part = b'--x\r\nContent-Disposition: form-data; name="name"\r\n\r\na\r\n--x--\r\n'
        return part, "multipart/form-data; boundary=x"
    return None, None


def sample(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Any:
    """The smallest value that a JSON schema takes: required properties, lower bounds."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return sample(document, document["components"]["schemas"][name])
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return sample(document, schema[key][0])
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type", "object")
    if kind == "object":
        properties = schema.get("properties", {})
        return {name: sample(document, properties[name]) for name in schema.get("required", [])}
    if kind == "array":
        return [sample(document, schema["items"])] * schema.get("minItems", 0)
    if kind == "string":
        return "x" * max(1, schema.get("minLength", 1))
    if kind in ("integer", "number"):
        return max(1, schema.get("minimum", 1))
    return kind == "boolean" or None
