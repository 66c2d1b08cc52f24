"""A vocabulary of bytes for grammars, and random JSON schemas of what the engine can follow."""

from typing import Any

from hypothesis import strategies as st

from engine.grammar import GrammarLimits, Grammars, Vocabulary

END = 256
BYTES = 257
"""Tokens 0..255 are bytes; 256 ends an answer."""


def byte_vocabulary() -> Vocabulary:
    return Vocabulary(
        tokens=[*(bytes([value]) for value in range(256)), b"<end>"],
        control=[END],
        end=[END],
        encode=lambda text: list(text.encode()),
    )


def byte_grammars(**limits: Any) -> Grammars:
    return Grammars(byte_vocabulary, GrammarLimits(**limits))


def text_of(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token != END).decode(errors="replace")


_STRINGS = st.one_of(
    st.integers(0, 5).flatmap(
        lambda least: st.integers(least, 8).map(
            lambda most: {"type": "string", "minLength": least, "maxLength": most}
        )
    ),
    st.sampled_from(["^[a-z]{2,5}$", "^(foo|bar)$", r"^\d{3}-\w$", "^é+x{0,3}$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    ),
    st.sampled_from(["date", "ipv4", "uuid"]).map(lambda name: {"type": "string", "format": name}),
)
_NUMBERS = st.tuples(st.integers(-40, 40), st.integers(0, 60)).flatmap(
    lambda ends: st.sampled_from(
        [
            {"type": "integer", "minimum": ends[0], "maximum": ends[0] + ends[1]},
            {"type": "integer", "exclusiveMinimum": ends[0], "maximum": ends[0] + ends[1] + 1},
            {"type": "integer", "minimum": 0, "maximum": 90, "multipleOf": 3},
            {"enum": [ends[0], "some", None, {"k": [True]}]},
            {"const": ends[0]},
        ]
    )
)
_LEAVES = _STRINGS | _NUMBERS | st.sampled_from([{"type": "boolean"}, {"type": "null"}])


def _larger(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    arrays = st.tuples(schemas, st.integers(0, 2), st.integers(0, 2)).map(
        lambda part: {
            "type": "array",
            "items": part[0],
            "minItems": part[1],
            "maxItems": part[1] + part[2],
        }
    )
    names = st.sampled_from(["a", "b", "name", "zé", 'q"x'])
    objects = st.tuples(st.dictionaries(names, schemas, max_size=3), st.integers(0, 7)).map(
        lambda part: {
            "type": "object",
            "properties": part[0],
            "required": [name for i, name in enumerate(part[0]) if part[1] >> i & 1],
            "additionalProperties": False,
        }
    )
    unions = st.lists(schemas, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts})
    return arrays | objects | unions


SCHEMAS = st.recursive(_LEAVES, _larger, max_leaves=6)
"""Schemas whose answers are short: every number and text in them has bounds."""
