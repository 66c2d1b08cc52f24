"""A schema is followed keyword by keyword, or refused with the place of what cannot be."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import InvalidRequest
from app.inference.json_schema import MOST_DEPTH, MOST_SUBSCHEMAS, MOST_VALUES, check_schema
from app.inference.response_format import ANY_OBJECT
from app.inference.schemas import chat_call
from engine.types import Grammar
from tests.grammars import SCHEMAS

KEYWORDS = [
    *("type", "enum", "const", "items", "anyOf", "properties", "required", "$ref", "$defs", "x"),
    *("minimum", "maximum", "minLength", "maxLength", "pattern", "format", "multipleOf"),
]
AT = "response_format.json_schema.schema"


def call(settings, form):
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "response_format": form}
    return chat_call(body, settings)


def with_schema(schema, **changes):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **changes}}


def refusal(settings, schema) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        call(settings, with_schema(schema))
    assert caught.value.status == 400
    assert caught.value.param in caught.value.message
    return caught.value


def nested(depth: int) -> dict:
    schema: dict = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


class TestResponseFormat:
    def test_text_asks_for_nothing(self, settings):
        assert call(settings, {"type": "text"}).grammar is None
        assert call(settings, None).grammar is None

    def test_any_object(self, settings):
        assert call(settings, {"type": "json_object"}).grammar == ANY_OBJECT

    @pytest.mark.parametrize("strict", [True, False, None])
    def test_a_schema_is_kept_whatever_strict_says(self, settings, strict):
        form = with_schema({"type": "integer"}, strict=strict, description="a number")
        assert call(settings, form).grammar == Grammar("json_schema", '{"type":"integer"}')

    @pytest.mark.parametrize(
        ("form", "param"),
        [
            ({}, "response_format.type"),
            ({"type": "xml"}, "response_format.type"),
            ({"type": "json_schema"}, "response_format.json_schema"),
            ({"type": "json_object", "json_schema": {}}, "response_format.json_schema"),
            ({"type": "json_schema", "json_schema": {}}, "response_format.json_schema.name"),
            (with_schema({}, name="a b"), "response_format.json_schema.name"),
            (with_schema(3), AT),
            (with_schema({}, strict="yes"), "response_format.json_schema.strict"),
            (with_schema({}, other=1), "response_format.json_schema.other"),
        ],
    )
    def test_the_form_is_checked_by_name(self, settings, form, param):
        with pytest.raises(InvalidRequest) as caught:
            call(settings, form)
        assert caught.value.param == param


class TestPlaces:
    @pytest.mark.parametrize(
        ("schema", "place", "code"),
        [
            ({"type": "strin"}, ".type", "invalid_schema"),
            ({"type": []}, ".type", "invalid_schema"),
            ({"properties": 3}, ".properties", "invalid_schema"),
            ({"properties": {"a": {"type": "x"}}}, ".properties.a.type", "invalid_schema"),
            ({"properties": {"a": 3}}, ".properties.a", "invalid_schema"),
            ({"items": [{}]}, ".items", "invalid_schema"),
            ({"anyOf": []}, ".anyOf", "invalid_schema"),
            ({"anyOf": [{}, {"enum": []}]}, ".anyOf[1].enum", "invalid_schema"),
            ({"required": "a"}, ".required", "invalid_schema"),
            ({"minLength": -1}, ".minLength", "invalid_schema"),
            ({"minItems": 3, "maxItems": 2}, ".minItems", "invalid_schema"),
            ({"minimum": 1e300}, ".minimum", "invalid_schema"),
            ({"multipleOf": 0}, ".multipleOf", "invalid_schema"),
            ({"$ref": "http://x/y"}, ".$ref", "invalid_schema"),
            ({"$ref": "#/$defs/none"}, ".$ref", "invalid_schema"),
            ({"examples": [{}], "$ref": "#/examples/0"}, ".$ref", "invalid_schema"),
            ({"not": {}}, ".not", "unsupported_schema"),
            ({"items": {"if": {}, "then": {}}}, ".items.if", "unsupported_schema"),
            ({"uniqueItems": True}, ".uniqueItems", "unsupported_schema"),
            ({"nullable": True}, ".nullable", "unsupported_schema"),
            ({"format": "zip"}, ".format", "unsupported_schema"),
            ({"x-guidance": {"lenient": True}}, ".x-guidance", "unsupported_schema"),
            ({"minLenght": 3}, ".minLenght", "unsupported_schema"),
            ({"items": {"$id": "x"}}, ".items.$id", "unsupported_schema"),
            ({"pattern": "a" * 600}, ".pattern", "schema_too_complex"),
            ({"enum": list(range(MOST_VALUES + 1))}, ".enum", "schema_too_complex"),
            ({"required": ["a"] * (MOST_SUBSCHEMAS + 1)}, ".required", "schema_too_complex"),
        ],
    )
    def test_are_named(self, settings, schema, place, code):
        error = refusal(settings, schema)
        assert (error.param, error.code) == (AT + place, code)

    def test_bounds_of_the_whole(self, settings):
        assert refusal(settings, {"title": "x" * 70_000}).code == "schema_too_complex"
        many = {"properties": {f"p{i}": {} for i in range(MOST_SUBSCHEMAS)}}
        assert refusal(settings, many).code == "schema_too_complex"
        assert refusal(settings, nested(MOST_DEPTH + 1)).code == "schema_too_complex"
        assert call(settings, with_schema(nested(MOST_DEPTH - 1))).grammar is not None

    def test_a_long_place_is_clipped(self, settings):
        error = refusal(settings, {"properties": {"x" * 500: nested(20) | {"not": {}}}})
        assert len(error.param) < 200


class TestAccepted:
    @given(schema=SCHEMAS)
    def test_what_the_engine_follows(self, schema):
        from app.settings import Settings

        check_schema(schema, AT, Settings())

    def test_annotations_and_references(self, settings):
        schema = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": "https://example.com/tree",
            "title": "Tree",
            "$defs": {"a/b": {"type": "array", "items": {"$ref": "#"}, "default": []}},
            "anyOf": [{"$ref": "#/$defs/a~1b"}, {"type": "null", "description": "no more"}],
        }
        grammar = call(settings, with_schema(schema)).grammar
        assert json.loads(grammar.text) == schema

    @given(
        schema=st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(KEYWORDS),
                    inner,
                    max_size=4,
                )
            ),
            max_leaves=10,
        )
    )
    def test_anything_is_accepted_or_refused_with_its_place(self, schema):
        from app.settings import Settings

        try:
            check_schema(schema, AT, Settings())
        except InvalidRequest as error:
            assert error.param.startswith(AT)  # noqa: PT017 - both outcomes are right
