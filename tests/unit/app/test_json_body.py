"""Bodies that are no JSON are refused in plain words, with what to send instead."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.json_body import unreadable

CASES = [
    (b"", "is empty; send one JSON object"),
    (b" \n", "is empty"),
    (b'{"a": 1e400}', "the number 1e400"),
    (b'{"a": -1e400}', "the number -1e400"),
    (b'{"a": ' + b"9" * 5000 + b"}", "the number 999"),
    (b'{"a": NaN}', "NaN, which JSON has not"),
    (b'{"a": -Infinity}', "-Infinity, which JSON has not"),
    (b"<?xml version='1.0'?><a/>", "XML or HTML"),
    (b'{"a": "\\ud800"}', "half a surrogate pair"),
    (b'{"a": "x\\udc00"}', "half a surrogate pair"),
    (b'{"a": "\xff"}', "not UTF-8 (byte 7)"),
    (b"\xef\xbb\xbf{}", "byte-order mark"),
    (b'{"a": 1', "ends in the middle"),
    (b'{"a": "1', "ends in the middle"),
    (b"{\n'a': 1}", "at line 2, column 1"),
    (b'{"a": 1,}', "commas"),
    (b'{"a": 1} {}', "send one object alone"),
    (b'{"a": "x\ny"}', "write it as an escape"),
    (b'{"a": "C:\\x"}', "a backslash"),
    (b'{"a": "\\u12"}', "four hexadecimal digits"),
    (b"[" * 100_000, "nested too deep"),
]


@pytest.mark.parametrize(("body", "words"), CASES)
def test_each_mistake_is_told_with_its_remedy(body: bytes, words: str) -> None:
    refusal = unreadable(body)
    assert words in refusal.message
    assert (refusal.status, refusal.code) == (400, "invalid_json")
    assert "send" in refusal.message or "write" in refusal.message or "check" in refusal.message
    assert len(refusal.message) < 250


def test_a_text_inside_quotes_is_no_number() -> None:
    assert "surrogate" in unreadable(b'{"a": "NaN 1e999 <b>", "b": "\\ud800"}').message


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_whatever_a_parser_refuses_gets_an_answer(body: bytes) -> None:
    for parse in (msgspec.json.decode, json.loads):
        try:
            parse(body)
        except ValueError:
            assert unreadable(body).code == "invalid_json"
