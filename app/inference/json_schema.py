"""JSON schemas of callers: what can be followed is checked keyword by keyword, with its place.

Every keyword is followed, is an annotation without effect, or is refused by name: an answer must
never pass for valid because a keyword was overlooked. Bounds keep what the engine compiles small;
the engine has bounds of its own. Follows JSON Schema 2020-12 as far as answers can be written
left to right under it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import msgspec

from app.errors import InvalidRequest
from app.inference.fields import clip, kind
from app.settings import Settings
from engine.types import Grammar

MOST_DEPTH = 32
MOST_SUBSCHEMAS = 1_000
MOST_VALUES = 1_000
"""Entries of all `enum`s together."""
LONGEST_PATTERN = 512
LARGEST_COUNT = 100_000
"""Of minLength, maxItems and their like."""
LARGEST_NUMBER = 2**53
"""Beyond it JSON's numbers are no longer exact."""
LONGEST_PLACE = 120

TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
FORMATS = (
    *("date-time", "time", "date", "duration", "email", "hostname"),
    *("ipv4", "ipv6", "uuid", "uri"),
)
ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$schema", "discriminator", "contentEncoding", "contentMediaType"),
    )
)
"""Accepted without effect on the answer."""
INSTEAD = {
    "nullable": 'write "null" among the types',
    "additionalItems": "write prefixItems and items",
    "not": "list what is allowed, with enum or anyOf",
    "if": "write the cases with anyOf",
    "then": "write the cases with anyOf",
    "else": "write the cases with anyOf",
    "uniqueItems": "remove it and check the answer yourself",
    "contains": "remove it and check the answer yourself",
    "propertyNames": "name the properties, or use patternProperties",
    "dependentRequired": "write the cases with anyOf",
    "dependentSchemas": "write the cases with anyOf",
    "unevaluatedProperties": "use additionalProperties",
    "unevaluatedItems": "use items",
    "$anchor": 'refer by path, as in "#/$defs/name"',
    "$dynamicRef": "use $ref",
}


def schema_grammar(schema: object, path: str, settings: Settings) -> Grammar:
    """The grammar of a schema at `path` of the body. Raises InvalidRequest with the place."""
    check_schema(schema, path, settings)
    return Grammar("json_schema", msgspec.json.encode(schema).decode())


def check_schema(schema: object, path: str, settings: Settings) -> None:
    """Raises InvalidRequest: `invalid_schema`, `unsupported_schema` or `schema_too_complex`."""
    size, most = len(msgspec.json.encode(schema)), settings.max_schema_bytes
    if size > most:
        raise _refusal(path, f"has {size} bytes; send at most {most}", "schema_too_complex")
    walk = _Walk()
    walk.visit(schema, path, "#", 0)
    for place, target in walk.references:
        if target not in walk.seen:
            raise _bad(place, f"points at {clip(target)!r}, which is no subschema of this schema")


@dataclass(slots=True)
class _Walk:
    seen: set[str] = field(default_factory=set)  # pointers of subschemas
    references: list[tuple[str, str]] = field(default_factory=list)  # (place, pointer)
    values: int = 0

    def visit(self, schema: object, path: str, pointer: str, depth: int) -> None:
        if depth > MOST_DEPTH:
            raise _refusal(path, f"is nested deeper than {MOST_DEPTH}", "schema_too_complex")
        self.seen.add(pointer)
        if len(self.seen) > MOST_SUBSCHEMAS:
            raise _refusal(
                path, f"is one of more than {MOST_SUBSCHEMAS} subschemas", "schema_too_complex"
            )
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise _bad(path, f"must be a schema, an object, not {kind(schema)}")
        for keyword, value in schema.items():
            place = f"{path}.{clip(keyword)}"
            check = _CHECKS.get(keyword)
            if check is not None:
                check(self, value, place)
            elif keyword in _CHILDREN:
                below = f"{pointer}/{keyword}"
                for at, child, step in _CHILDREN[keyword](value, place):
                    self.visit(child, at, f"{below}{step}", depth + 1)
            elif keyword == "$id" and pointer == "#":
                continue
            elif keyword not in ANNOTATIONS:
                remedy = INSTEAD.get(keyword, "it is no keyword that answers can follow; remove it")
                raise _refusal(place, f"is not supported; {remedy}", "unsupported_schema")
        _check_order(schema, path)


# --------------------------------------------------------------------------- keywords


def _children_of_one(value: object, place: str) -> list[tuple[str, Any, str]]:
    if isinstance(value, list):
        raise _bad(place, "must be one schema; give those of the first items as prefixItems")
    return [(place, value, "")]


def _children_of_list(value: object, place: str) -> list[tuple[str, Any, str]]:
    if not isinstance(value, list) or not value:
        raise _bad(place, "must be a list of at least one schema")
    return [(f"{place}[{index}]", child, f"/{index}") for index, child in enumerate(value)]


def _children_of_map(value: object, place: str) -> list[tuple[str, Any, str]]:
    if not isinstance(value, dict):
        raise _bad(place, f"must be an object of schemas, not {kind(value)}")
    return [
        (f"{place}.{clip(name)}", child, "/" + name.replace("~", "~0").replace("/", "~1"))
        for name, child in value.items()
    ]


_CHILDREN: dict[str, Callable[[object, str], list[tuple[str, Any, str]]]] = {
    "items": _children_of_one,
    "additionalProperties": _children_of_one,
    "anyOf": _children_of_list,
    "oneOf": _children_of_list,
    "allOf": _children_of_list,
    "prefixItems": _children_of_list,
    "properties": _children_of_map,
    "patternProperties": _children_of_map,
    "$defs": _children_of_map,
    "definitions": _children_of_map,
}


def _type(walk: _Walk, value: object, place: str) -> None:
    names = value if isinstance(value, list) else [value]
    if not names:
        raise _bad(place, "is empty; name a type")
    for name in names:
        if name not in TYPES:
            raise _bad(place, f"is {clip(name)!r}; must be one of {', '.join(TYPES)}")


def _enum(walk: _Walk, value: object, place: str) -> None:
    if not isinstance(value, list) or not value:
        raise _bad(place, "must be a list of at least one value")
    walk.values += len(value)
    if walk.values > MOST_VALUES:
        raise _refusal(place, f"brings more than {MOST_VALUES} values", "schema_too_complex")


def _anything(walk: _Walk, value: object, place: str) -> None:
    return


def _count(walk: _Walk, value: object, place: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST_COUNT:
        raise _bad(place, f"must be a whole number from 0 to {LARGEST_COUNT}, not {clip(value)}")


def _number(walk: _Walk, value: object, place: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _bad(place, f"must be a number, not {kind(value)}")
    if not -LARGEST_NUMBER <= value <= LARGEST_NUMBER:
        raise _bad(place, "must lie between -2^53 and 2^53")


def _multiple(walk: _Walk, value: object, place: str) -> None:
    _number(walk, value, place)
    if not isinstance(value, int | float) or value <= 0:
        raise _bad(place, f"must be above 0, not {clip(value)}")


def _pattern(walk: _Walk, value: object, place: str) -> None:
    if not isinstance(value, str):
        raise _bad(place, f"must be a regular expression, a string, not {kind(value)}")
    if len(value) > LONGEST_PATTERN:
        raise _refusal(
            place,
            f"has {len(value)} characters; send at most {LONGEST_PATTERN}",
            "schema_too_complex",
        )


def _format(walk: _Walk, value: object, place: str) -> None:
    if value not in FORMATS:
        raise _refusal(
            place,
            f"is {clip(value)!r}, which is not supported; use one of {', '.join(FORMATS)}",
            "unsupported_schema",
        )


def _required(walk: _Walk, value: object, place: str) -> None:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _bad(place, "must be a list of property names")
    if len(value) > MOST_SUBSCHEMAS:
        raise _refusal(place, f"names more than {MOST_SUBSCHEMAS}", "schema_too_complex")


def _reference(walk: _Walk, value: object, place: str) -> None:
    if not isinstance(value, str):
        raise _bad(place, f"must be a string, not {kind(value)}")
    if value != "#" and not value.startswith("#/"):
        raise _bad(place, 'must point into this schema, as "#/$defs/name" does')
    walk.references.append((place, unquote(value)))


_CHECKS: dict[str, Callable[[_Walk, object, str], None]] = {
    "type": _type,
    "enum": _enum,
    "const": _anything,
    "pattern": _pattern,
    "format": _format,
    "required": _required,
    "multipleOf": _multiple,
    "$ref": _reference,
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _count
    ),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _number),
}

_PAIRS = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties"),
          ("minimum", "maximum"))  # fmt: skip


def _check_order(schema: dict[str, Any], path: str) -> None:
    for low, high in _PAIRS:
        if low in schema and high in schema and schema[low] > schema[high]:
            raise _bad(f"{path}.{low}", f"is above {high}, so that nothing can be valid")


def _bad(place: str, sentence: str) -> InvalidRequest:
    return _refusal(place, sentence, "invalid_schema")


def _refusal(place: str, sentence: str, code: str) -> InvalidRequest:
    if len(place) > LONGEST_PLACE:
        place = place[: LONGEST_PLACE // 2] + "…" + place[-LONGEST_PLACE // 2 :]
    return InvalidRequest(f"{place} {sentence}", code=code, param=place)
