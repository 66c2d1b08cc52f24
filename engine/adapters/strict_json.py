"""JSON from strangers, read strictly: UTF-8, one object, no duplicate keys, no NaN, bounded.

Python's own parser is lenient (NaN, duplicates, lone surrogates, huge integers); this refuses each
by name and keeps time and memory linear in the (bounded) input.
"""

import codecs
import json
import math
from typing import Any, NoReturn

MAX_DEPTH = 16
MAX_NUMBER_CHARACTERS = 80


class JsonRefused(ValueError):
    """`code` is malformed_json, duplicate_key, byte_order_mark or json_too_deep."""

    def __init__(self, code: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object that `data` holds. The caller bounds its size. Raises JsonRefused."""
    text = _decode(data)
    _bound_depth(text)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_int=_integer,
            parse_float=_number,
        )
    except json.JSONDecodeError as error:
        raise JsonRefused(
            "malformed_json",
            f"it is not JSON: {error.msg} at line {error.lineno}, column {error.colno}",
        ) from None
    if not isinstance(value, dict):
        raise JsonRefused("malformed_json", "it is not one JSON object")
    return value


def _decode(data: bytes) -> str:
    if data.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise JsonRefused(
            "byte_order_mark", "begins with a byte-order mark: save it as plain UTF-8 without one"
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonRefused(
            "malformed_json", f"it is not UTF-8: byte {error.start} is invalid"
        ) from None


def _bound_depth(text: str) -> None:
    """Counts brackets outside strings, so that no recursion follows the client's nesting."""
    depth, in_string, escaped = 0, False, False
    for character in text:
        if in_string:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == '"':
                in_string = False
        elif character == '"':
            in_string = True
        elif character in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise JsonRefused("json_too_deep", f"it is nested deeper than {MAX_DEPTH} levels")
        elif character in "]}":
            depth -= 1


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        _storable(key)
        _storable(value)
        if key in result:
            raise JsonRefused("duplicate_key", f"the key {key[:60]!a} is given twice", key[:60])
        result[key] = value
    return result


def _storable(value: object) -> None:
    """Refuses text that no database column or UTF-8 answer can hold."""
    if isinstance(value, str):
        if "\x00" in value or any("\ud800" <= c <= "\udfff" for c in value):
            raise JsonRefused("malformed_json", "it has a string with NUL or half a surrogate pair")
    elif isinstance(value, list):
        for item in value:
            _storable(item)


def _no_constant(name: str) -> NoReturn:
    raise JsonRefused("malformed_json", f"it has {name}, which is not JSON")


def _integer(digits: str) -> int:
    if len(digits) > MAX_NUMBER_CHARACTERS:
        raise JsonRefused("malformed_json", f"it has a number of {len(digits)} digits")
    return int(digits)


def _number(digits: str) -> float:
    value = float(digits)
    if len(digits) > MAX_NUMBER_CHARACTERS or not math.isfinite(value):
        raise JsonRefused("malformed_json", f"its number {digits[:20]} is out of range")
    return value
