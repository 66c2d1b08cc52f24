"""`response_format`: text, any JSON object, or JSON of a schema."""

import re

from app.inference.fields import Fields, clip, refused, unsupported
from app.inference.json_schema import schema_grammar
from app.settings import Settings
from engine.types import Grammar

SCHEMA_PARAM = "response_format.json_schema.schema"
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')


def response_grammar(fields: Fields, settings: Settings) -> Grammar | None:
    """What every choice must look like; None for free text. `strict` is always kept, so it needs
    no other value than what the caller sends."""
    form = fields.object("response_format")
    if form is None:
        return None
    type_ = form.text("type")
    grammar: Grammar | None = None
    if type_ == "json_object":
        grammar = ANY_OBJECT
    elif type_ == "json_schema":
        grammar = _schema(form, settings)
    elif type_ is None:
        raise refused("response_format.type", "is missing; send text, json_object or json_schema")
    elif type_ != "text":
        raise unsupported(
            "response_format.type",
            f"{clip(type_)!r} is none of text, json_object and json_schema",
        )
    form.finish()
    return grammar


def _schema(form: Fields, settings: Settings) -> Grammar:
    own = form.object("json_schema")
    if own is None:
        raise refused("response_format.json_schema", "is missing; send its name and schema")
    name = own.text("name")
    if name is None or NAME.fullmatch(name) is None:
        raise refused("response_format.json_schema.name", "must be 1 to 64 letters, digits, _ or -")
    own.text("description")
    own.flag("strict")
    schema = own.take("schema")
    if not isinstance(schema, dict):
        raise refused(SCHEMA_PARAM, "must be a JSON schema, an object", code="invalid_schema")
    own.finish()
    return schema_grammar(schema, SCHEMA_PARAM, settings)
