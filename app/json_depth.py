"""Where a JSON text is nested deeper than it can be read: for the refusal's `param`."""

import re

from app.errors import InvalidRequest

SHOWN_PARTS = 4
"""Of a path that goes on for thousands."""
_TOKEN = re.compile(rb'"((?:[^"\\]|\\.)*)"|[{}\[\],]', re.DOTALL)


def too_deep(body: bytes) -> InvalidRequest:
    """The refusal of a body whose nesting no parser here follows."""
    field = deepest_field(body)
    return InvalidRequest(
        f"{f'`{field}`' if field else 'The body'} is nested too deep to be read; send fewer lists "
        "and objects inside each other.",
        code="invalid_json",
        param=field or None,
    )


def deepest_field(body: bytes) -> str:
    """How the path of the deepest value begins, like `messages[0].content`.

    "" for a text that is no object. It recurses nowhere, and takes any bytes.
    """
    path: list[str | int] = []
    beginning: list[str | int] = []
    depth = 0
    for token in _TOKEN.finditer(body):
        sign = token[0][:1]
        if sign == b'"':
            if path and path[-1] == "":  # an object's key
                path[-1] = token[1].decode("utf-8", "replace")
        elif sign in b"{[":
            path.append("" if sign == b"{" else 0)
            if len(path) > depth:
                depth, beginning = len(path), path[:SHOWN_PARTS]
        elif sign in b"}]":
            del path[-1:]
        elif path:
            last = path[-1]
            path[-1] = last + 1 if isinstance(last, int) else ""
    return _written(beginning)


def _written(path: list[str | int]) -> str:
    if not path or isinstance(path[0], int):
        return ""
    name = str(path[0])
    for part in path[1:]:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if part else ""
    return name[:120]
