"""The grammars of answers with calls, followed byte by byte by the engine's own library."""

import json
from dataclasses import replace
from typing import Any

import pytest
from llguidance import LLMatcher

from app.inference.call_grammar import MOST_CALLS, call_grammar
from app.inference.schemas import chat_call
from app.settings import Settings
from engine.grammar import open_tokenizer
from engine.tool_format import ToolFormat
from tests.grammars import byte_grammars, byte_vocabulary

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
WRONG = ROME.replace("city", "town")
TIME = '<tool_call>\n{"name": "time", "arguments": {"zone": 1}}\n</tool_call>'
LLAMA = '{"name": "weather", "parameters": {"city": "Rome"}}'


@pytest.fixture(scope="module")
def vocabulary() -> Any:
    return byte_grammars()._vocabulary()


MARK = 257


def marked_vocabulary() -> Any:
    """Bytes, the end, and a control token that opens calls."""
    plain = byte_vocabulary()
    tokens = [*plain.tokens, b"[TOOL_CALLS]"]
    return open_tokenizer(replace(plain, tokens=tokens, control=[*plain.control, MARK]))


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": CITY, **function}}


def taken(
    vocabulary: Any, settings: Settings, family: ToolFormat, texts: list[str], **changes: Any
) -> list[bool]:
    """Which of the texts are whole answers."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [tool("weather", strict=True), tool("time")],
    }
    use = chat_call({**body, **changes}, settings).tools
    assert use is not None
    grammar = call_grammar(use, family)
    assert grammar is not None
    whole = []
    for text in texts:
        matcher = LLMatcher(vocabulary, grammar.text, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        tokens = list(text.encode())
        whole.append(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())
    return whole


class TestHermes:
    def test_strict_arguments_validate_and_the_rest_is_free(
        self, vocabulary: Any, settings: Settings
    ) -> None:
        free = ["", "It is <b>sunny</b>.", f"Let me see.\n{ROME}\n{TIME} done", "a <tool_"]
        held = [WRONG, "<tool_call>oops", ROME.replace("weather", "other"), f"{ROME}{WRONG}"]
        assert taken(vocabulary, settings, "hermes", free + held) == [True] * 4 + [False] * 4

    def test_one_call_where_parallel_ones_are_not_wanted(
        self, vocabulary: Any, settings: Settings
    ) -> None:
        texts = ["text", f"See: {ROME}", f"{ROME}\n{TIME}", f"{ROME} and"]
        found = taken(vocabulary, settings, "hermes", texts, parallel_tool_calls=False)
        assert found == [True, True, False, False]

    def test_a_required_call_may_be_several_and_each_validates(
        self, vocabulary: Any, settings: Settings
    ) -> None:
        other = ROME.replace("weather", "time")
        texts = [ROME, f"{ROME}\n{other}", "\n".join([ROME] * MOST_CALLS)]
        texts += ["", "text", f"{ROME}\n{TIME}", "\n".join([ROME] * (MOST_CALLS + 1))]
        found = taken(vocabulary, settings, "hermes", texts, tool_choice="required")
        assert found == [True] * 3 + [False] * 4

    def test_a_named_function_is_one_call(self, vocabulary: Any, settings: Settings) -> None:
        named = {"type": "function", "function": {"name": "weather"}}
        texts = [ROME, f"{ROME}\n{ROME}", TIME]
        found = taken(vocabulary, settings, "hermes", texts, tool_choice=named)
        assert found == [True, False, False]

    def test_content_beside_tools_follows_the_response_format(
        self, vocabulary: Any, settings: Settings
    ) -> None:
        answer = json.dumps({"city": "Rome"})
        texts = [answer, ROME, f"{ROME}\n{ROME}", "text", f"{answer}{ROME}", WRONG]
        found = taken(vocabulary, settings, "hermes", texts, response_format=FORM)
        assert found == [True, True, True, False, False, False]
        forced = taken(
            vocabulary, settings, "hermes", texts, response_format=FORM, tool_choice="required"
        )
        assert forced == [False, True, True, False, False, False]


MISTRAL = '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]'
CALL = MISTRAL.removeprefix("[TOOL_CALLS][").removesuffix("]")


class TestMistral:
    def test_strict_arguments_validate_and_the_rest_is_free(
        self, vocabulary: Any, settings: Settings
    ) -> None:
        other = '{"name": "time", "arguments": {"zone": 1}, "id": "a1B2c3D4e"}'
        free = ["", "It is [sunny].", f"See: {MISTRAL}", f"[TOOL_CALLS] [{CALL}, {other}]"]
        held = [MISTRAL.replace("city", "town"), "[TOOL_CALLS]oops", f"{MISTRAL} and"]
        held += [MISTRAL.replace("weather", "other"), "[TOOL_CALLS][]"]
        assert taken(vocabulary, settings, "mistral", free + held) == [True] * 4 + [False] * 5

    def test_one_call_where_parallel_ones_are_not_wanted(
        self, vocabulary: Any, settings: Settings
    ) -> None:
        texts = ["text", MISTRAL, f"[TOOL_CALLS][{CALL}, {CALL}]"]
        found = taken(vocabulary, settings, "mistral", texts, parallel_tool_calls=False)
        assert found == [True, True, False]

    def test_a_required_call_may_be_several_and_each_validates(
        self, vocabulary: Any, settings: Settings
    ) -> None:
        most = ", ".join([CALL] * MOST_CALLS)
        texts = [MISTRAL, f"[TOOL_CALLS][{most}]", "", "text", f"[TOOL_CALLS][{most}, {CALL}]"]
        found = taken(vocabulary, settings, "mistral", texts, tool_choice="required")
        assert found == [True, True, False, False, False]

    def test_content_beside_tools_follows_the_response_format(
        self, vocabulary: Any, settings: Settings
    ) -> None:
        answer = json.dumps({"city": "Rome"})
        texts = [answer, MISTRAL, "text", f"{answer}{MISTRAL}"]
        found = taken(vocabulary, settings, "mistral", texts, response_format=FORM)
        assert found == [True, True, False, False]

    @pytest.mark.parametrize("choice", ["auto", "required"])
    def test_a_mark_that_is_a_control_token_is_that_token(
        self, vocabulary: Any, settings: Settings, choice: str
    ) -> None:
        use = chat_call(
            {
                "model": "m",
                "messages": [{"role": "user", "content": "hi"}],
                "tools": [tool("weather", strict=True)],
                "tool_choice": choice,
            },
            settings,
        ).tools
        assert use is not None
        grammar = call_grammar(use, "mistral", MARK)
        assert grammar is not None
        listed = MISTRAL.removeprefix("[TOOL_CALLS]")
        free = choice == "auto"
        for tokens, whole in (
            ([MARK, *listed.encode()], True),
            ([*b"See: ", MARK, *listed.encode()], free),
            ([*b"text"], free),
            ([MARK, *listed.replace("city", "town").encode()], False),
            ([MARK], False),
        ):
            matcher = LLMatcher(marked_vocabulary(), grammar.text, log_level=0)
            assert not matcher.is_error(), matcher.get_error()
            taken_whole = matcher.try_consume_tokens(tokens) == len(tokens)
            assert (taken_whole and matcher.is_accepting()) is whole


class TestLlama:
    def test_strict_arguments_validate_and_the_rest_is_free(
        self, vocabulary: Any, settings: Settings
    ) -> None:
        free = ["", "It is {sunny}.", LLAMA, '{"name": "time", "parameters": {"zone": 1}}']
        held = [LLAMA.replace("city", "town"), '{"a": 1}', f" {LLAMA}", f"{LLAMA} and"]
        assert taken(vocabulary, settings, "llama", free + held) == [True] * 4 + [False] * 4

    def test_one_call_needs_no_grammar(self, settings: Settings) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        call = chat_call(body | {"tools": [tool("f")], "parallel_tool_calls": False}, settings)
        assert call.tools is not None
        assert call_grammar(call.tools, "llama") is None
        assert call_grammar(call.tools, "hermes") is not None

    def test_a_required_call_is_one(self, vocabulary: Any, settings: Settings) -> None:
        texts = [LLAMA, f"{LLAMA}\n{LLAMA}", "text", LLAMA.replace("city", "town")]
        found = taken(vocabulary, settings, "llama", texts, tool_choice="required")
        assert found == [True, False, False, False]
