"""Why a body is no JSON that can be read, in plain words with the remedy.

Two parsers read bodies, and each words its refusals for itself. This looks again at what one of
them refused, strictly (RFC 8259), so that the same mistake gets the same answer on every route.
"""

import json
import sys
from typing import NoReturn

from app.errors import InvalidRequest
from app.json_depth import too_deep

_QUOTED_CHARACTERS = 40
_LARGEST = f"{sys.float_info.max:.2g}"
_MISTAKES = {
    "Extra data": "goes on after its end; send one object alone",
    "Invalid control character at": "has a line break, a tab or another control character inside "
    "a string; write it as an escape like \\n",
    "Invalid \\escape": "has a backslash inside a string that begins no escape; write \\\\ for a "
    "backslash",
    "Invalid \\uXXXX escape": "has a \\u inside a string; write four hexadecimal digits after it",
}
"""What the standard library's parser calls them, and what is said here."""


class _Unreadable(Exception):
    """The text says what is wrong and what to send."""


def unreadable(body: bytes) -> InvalidRequest:
    """The refusal of a body that a parser has refused."""
    try:
        _look(body)
    except RecursionError:
        return too_deep(body)
    except _Unreadable as error:
        return InvalidRequest(f"The body {error}.", code="invalid_json")
    return InvalidRequest(
        "The body has half a surrogate pair, such as a lone \\ud800, inside a string; write the "
        "whole character, or leave it out.",
        code="invalid_json",
    )


def _look(body: bytes) -> None:
    """Raises what it finds; half a surrogate pair alone passes."""
    if not body.strip():
        raise _Unreadable("is empty; send one JSON object")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _Unreadable(f"is not UTF-8 (byte {error.start}); send JSON in UTF-8") from None
    if text.startswith("\ufeff"):
        raise _Unreadable("begins with a byte-order mark; send UTF-8 without one")
    if text.lstrip().startswith("<"):
        raise _Unreadable("is XML or HTML; send one JSON object")
    try:
        json.loads(text, parse_constant=_no_number, parse_float=_finite, parse_int=_finite)
    except json.JSONDecodeError as error:
        raise _Unreadable(_mistake(text, error)) from None


def _no_number(name: str) -> NoReturn:
    raise _Unreadable(f"has {name}, which JSON has not; send a number, or leave the field out")


def _finite(digits: str) -> float:
    number = float(digits)
    if abs(number) > sys.float_info.max:
        shown = digits[:_QUOTED_CHARACTERS] + "…" * (len(digits) > _QUOTED_CHARACTERS)
        raise _Unreadable(f"has the number {shown}; send one between -{_LARGEST} and {_LARGEST}")
    return number


def _mistake(text: str, error: json.JSONDecodeError) -> str:
    unfinished = error.msg.startswith("Unterminated string")
    if unfinished or error.pos >= len(text.rstrip()):
        return "ends in the middle of its JSON; send it whole, and close every quote and bracket"
    place = f"at line {error.lineno}, column {error.colno}"
    known = _MISTAKES.get(error.msg)
    if known is not None:
        return f"is not JSON: {place} it {known}"
    return (
        f"is not JSON {place}; check the quotes (double ones), commas and brackets there, and send "
        "one JSON object"
    )
