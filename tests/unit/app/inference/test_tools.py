"""Tools: what may be called, what must be, and the calls in what a model writes."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import InvalidRequest
from app.inference.call_grammar import call_grammar
from app.inference.schemas import chat_call, completion_call
from app.inference.tool_calls import Found, call_text
from tests.fake_engine import BASE_NAME, ByteCodec

HELLO = [{"role": "user", "content": "hi"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name="weather", **function):
    return {"type": "function", "function": {"name": name, "parameters": CITY, **function}}


def chat(settings, **changes):
    return chat_call({"model": "m", "messages": HELLO, **changes}, settings)


def refusal(settings, **changes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        chat(settings, **changes)
    return caught.value


NAMED = {"type": "function", "function": {"name": "time"}}


class TestChoice:
    def test_auto_leaves_it_to_the_model(self, settings):
        for choice in ("auto", None):
            call = chat(settings, tools=[tool()], tool_choice=choice)
            assert call.tools.names == {"weather"}
            assert call.tools.shown == (tool(),)
            assert call_grammar(call.tools, "hermes") is None
            assert call.tools_param == "tools"

    def test_none_shows_nothing(self, settings):
        call = chat(settings, tools=[tool()], tool_choice="none")
        assert (call.tools, call.tools_param) == (None, None)

    def test_without_tools_none_and_auto_say_nothing(self, settings):
        for choice in ("none", "auto"):
            assert chat(settings, tools=[], tool_choice=choice).tools is None

    def test_required_is_one_of_all_and_a_name_that_one(self, settings):
        tools = [tool(), tool("time", strict=True)]
        required = chat(settings, tools=tools, tool_choice="required")
        named = chat(settings, tools=tools, tool_choice=NAMED)
        assert (required.tools.forced, required.tools.parallel) == (("weather", "time"), True)
        assert (named.tools.forced, named.tools.parallel) == (("time",), False)
        assert named.tools.names == {"weather", "time"}
        assert named.grammar_param == "tools"

    @pytest.mark.parametrize(
        ("changes", "param", "code"),
        [
            ({"tools": {}}, "tools", "invalid_value"),
            ({"tools": [3]}, "tools[0]", "invalid_value"),
            ({"tools": [tool()] * 129}, "tools", "invalid_value"),
            ({"tools": [tool(), tool()]}, "tools[1].function.name", "invalid_value"),
            ({"tools": [{"type": "custom"}]}, "tools[0].type", "unsupported_parameter"),
            ({"tools": [{"type": "function"}]}, "tools[0].function", "invalid_value"),
            ({"tools": [tool("a b")]}, "tools[0].function.name", "invalid_value"),
            ({"tools": [tool(parameters=3)]}, "tools[0].function.parameters", "invalid_schema"),
            ({"tools": [tool(description="x" * 70_000)]}, "tools", "schema_too_complex"),
            ({"tools": [tool(other=1)]}, "tools[0].function.other", "unknown_parameter"),
            (
                {"tools": [tool(strict=True, parameters={"not": {}})]},
                "tools[0].function.parameters.not",
                "unsupported_schema",
            ),
            ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "invalid_value"),
            (
                {"tools": [tool(parameters={"not": {}})], "tool_choice": "required"},
                "tools[0].function.parameters.not",
                "unsupported_schema",
            ),
            ({"tools": [tool()], "tool_choice": "any"}, "tool_choice", "invalid_value"),
            (
                {"tools": [tool()], "tool_choice": NAMED},
                "tool_choice.function.name",
                "invalid_value",
            ),
        ],
    )
    def test_refusals_name_the_field(self, settings, changes, param, code):
        error = refusal(settings, **changes)
        assert (error.param, error.code) == (param, code)

    def test_completions_have_no_tools(self, settings):
        body = {"model": "m", "prompt": "x", "tools": [tool()]}
        with pytest.raises(InvalidRequest) as caught:
            completion_call(body, settings)
        assert caught.value.code == "tools_unsupported"


def asked(arguments='{"city": "Rome"}', call_id="call_1"):
    function = {"name": "weather", "arguments": arguments}
    calls = [{"id": call_id, "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


class TestMessages:
    def test_calls_and_results_reach_the_template_as_objects(self, settings):
        result = {"role": "tool", "tool_call_id": "call_1", "content": "sun"}
        call = chat(settings, messages=[*HELLO, asked(), result])
        assert call.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
        assert call.messages[2]["name"] == "weather"
        assert call.tools_param == "messages[1].tool_calls"

    def test_arguments_that_are_no_json_stay_text(self, settings):
        call = chat(settings, messages=[*HELLO, asked("{oops")])
        assert call.messages[1]["tool_calls"][0]["function"]["arguments"] == "{oops"

    @pytest.mark.parametrize(
        ("message", "param"),
        [
            ({"role": "tool", "content": "x"}, "messages[1].tool_call_id"),
            ({"role": "tool", "content": "x", "tool_call_id": "n"}, "messages[1].tool_call_id"),
            ({"role": "user", "content": "x", "tool_call_id": "n"}, "messages[1].tool_call_id"),
            ({"role": "user", "content": "x", "tool_calls": [{}]}, "messages[1].tool_calls[0].id"),
            (asked() | {"role": "user"}, "messages[1].tool_calls"),
            (asked() | {"tool_calls": 3}, "messages[1].tool_calls"),
            ({"role": "assistant", "content": None}, "messages[1].content"),
        ],
    )
    def test_refusals_name_the_field(self, settings, message, param):
        assert refusal(settings, messages=[*HELLO, message]).param == param


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def read(text: str, cuts: list[int], family="hermes") -> tuple[str, list[tuple[str, str]]]:
    reader = call_text(family, {"weather"})
    at = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    content, calls = "", []
    for begin, end in pairwise(at):
        found = reader.push(text[begin:end])
        content += found.text
        calls += found.calls
    rest = reader.finish()
    calls += rest.calls
    assert [call.index for call in calls] == list(range(len(calls)))
    assert len({call.id for call in calls}) == len(calls)
    return content + rest.text, [(call.name, call.arguments) for call in calls]


ROME = ("weather", '{"city": "Rome"}')


class TestReading:
    @pytest.mark.parametrize(
        ("text", "content", "calls"),
        [
            ("plain text", "plain text", []),
            (CALL, "", [ROME]),
            (f"Let me see.\n{CALL}\n{CALL}\n", "Let me see.", [ROME, ROME]),
            (f"{CALL} and then", " and then", [ROME]),
            (CALL.removesuffix("\n</tool_call>"), "", [ROME]),  # the end came instead
            ('<tool_call>{"name": "other"}</tool_call>', None, []),
            ("<tool_call>oops</tool_call>", None, []),
            ('<tool_call>{"name": "weather", "arguments": 3}</tool_call>', None, []),
            ('<tool_call>{"name": "weather", "arguments": NaN}</tool_call>', None, []),
            ("<tool_call>" + "[" * 5000 + "</tool_call>", None, []),
            ("<tool_call>", None, []),
            ("a < b <tool", None, []),
            (
                '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call>"}}</tool_call>',
                "",
                [("weather", '{"city": "</tool_call>"}')],
            ),
            (
                '<tool_call>{"name": "weather", "arguments": "{}"}</tool_call>',
                "",
                [("weather", "{}")],
            ),
        ],
    )
    @given(cuts=st.lists(st.integers(0, 200), max_size=8))
    def test_is_the_same_however_the_text_is_cut(self, text, content, calls, cuts):
        """None: what is no call comes out as the text it is."""
        got, found = read(text, cuts)
        assert found == calls
        assert got.strip() == (text if content is None else content).strip()

    def test_text_before_a_call_is_not_held_back(self):
        assert call_text("hermes", {"weather"}).push("It is <b>").text == "It is <b>"


LLAMA = '{"name": "weather", "parameters": {"city": "Rome"}}'


class TestReadingLlama:
    @pytest.mark.parametrize(
        ("text", "content", "calls"),
        [
            ("It is sunny {today}.", None, []),
            (LLAMA, "", [ROME]),
            (f"\n\n{LLAMA}\n", "", [ROME]),
            ('{"name": "weather", "parameters": {"city": "}\\\\"}}', "",
             [("weather", '{"city": "}\\\\"}')]),
            ('{"name": "weather", "parameters": {"city": "a\\"}"}}', "",
             [("weather", '{"city": "a\\"}"}')]),
            (f"{LLAMA}; {LLAMA}", f"; {LLAMA}", [ROME]),  # its template takes one call a message
            ('{"type": "function", "name": "weather", "parameters": {"city": "Rome"}}', "", [ROME]),
            ('{"name": "weather", "arguments": {"city": "Rome"}}', "", [ROME]),
            ('{"name":"weather"}', "", [("weather", "{}")]),
            ('{"name": "other", "parameters": {}}', None, []),
            ('{"name": "weather", "parameters": 3}', None, []),
            ('{"city": "Rome"}', None, []),
            (LLAMA[:-3], None, []),
            (f"I call {LLAMA}", None, []),
            ("{", None, []),
            (" ", None, []),
        ],
    )  # fmt: skip
    @given(cuts=st.lists(st.integers(0, 200), max_size=8))
    def test_is_the_same_however_the_text_is_cut(self, text, content, calls, cuts):
        got, found = read(text, cuts, "llama")
        assert found == calls
        assert got == (text if content is None else content)

    def test_only_what_may_become_a_call_is_held_back(self):
        for begun, out in (("It", "It"), ('{"ci', '{"ci'), ('{"na', ""), ('{"name": "we', "")):
            assert call_text("llama", {"weather"}).push(begun).text == out


MISTRAL = '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}]'
ONE = '{"name": "weather", "arguments": {"city": "Rome"}, "id": "a1B2c3D4e"}'


class TestReadingMistral:
    @pytest.mark.parametrize(
        ("text", "content", "calls"),
        [
            ("It is [TOOL] sunny.", None, []),
            (MISTRAL, "", [ROME]),
            (f"Let me see. {MISTRAL}", "Let me see. ", [ROME]),
            (f"[TOOL_CALLS][{ONE}, {ONE}]\n", "", [ROME, ROME]),
            (f"[TOOL_CALLS]\n[\n{ONE},\n{ONE}\n] done", " done", [ROME, ROME]),
            ('[TOOL_CALLS][{"name": "weather", "arguments": {"city": "]}"}}]', "",
             [("weather", '{"city": "]}"}')]),
            (MISTRAL[:-1], "", [ROME]),  # the end came for the bracket
            (MISTRAL[:-3], None, []),
            (f'[TOOL_CALLS][{ONE}, {{"name": "wea', ', {"name": "wea', [ROME]),
            (f'[TOOL_CALLS][{ONE}, {{"name": "other"}}]', ', {"name": "other"}]', [ROME]),
            ('[TOOL_CALLS] [{"name": "other", "arguments": {}}]', None, []),
            ("[TOOL_CALLS] oops", None, []),
            ("[TOOL_CALLS][]", None, []),
            ("[TOOL_CALLS]weather[ARGS]{}", None, []),
            ("[TOOL_CALLS][" + "[" * 5000, None, []),
            (f"[TOOL_CALLS] no {MISTRAL}", "[TOOL_CALLS] no ", [ROME]),
            ("[TOOL_CA", None, []),
            (" ", None, []),
        ],
    )  # fmt: skip
    @given(cuts=st.lists(st.integers(0, 200), max_size=8))
    def test_is_the_same_however_the_text_is_cut(self, text, content, calls, cuts):
        got, found = read(text, cuts, "mistral")
        assert found == calls
        assert got.strip() == (text if content is None else content).strip()

    def test_a_call_goes_out_before_the_list_has_ended(self):
        reader = call_text("mistral", {"weather"})
        assert len(reader.push(f"[TOOL_CALLS][{ONE}").calls) == 1
        assert reader.push(f", {ONE[:20]}") == Found()


@pytest.fixture
def _tools(monkeypatch):
    monkeypatch.setattr(ByteCodec, "tool_format", "hermes")


def _make_mark(monkeypatch, token):
    """That byte is the control token which opens calls."""
    plain = ByteCodec.token_bytes
    monkeypatch.setattr(ByteCodec, "call_mark", token)
    monkeypatch.setattr(ByteCodec, "is_control", lambda self, id_: id_ >= 256 or id_ == token)
    monkeypatch.setattr(
        ByteCodec,
        "token_bytes",
        lambda self, id_: b"[TOOL_CALLS]" if id_ == token else plain(self, id_),
    )


BODY = {"model": BASE_NAME, "messages": HELLO, "tools": [tool()]}


class TestAnswers:
    async def test_without_a_format_for_tools_the_remedy_is_named(self, api, engine):
        for body in (BODY, {**BODY, "tools": None, "messages": [*HELLO, asked()]}):
            response = await api.post("/v1/chat/completions", json=body)
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, "tools_unsupported")
            assert "LORAMUX_TOOL_FORMAT" in error["message"]
        assert engine.requests == []

    @pytest.mark.usefixtures("_tools")
    async def test_calls_are_parsed(self, api, engine):
        engine.text = f"Let me see.\n{CALL}"
        response = await api.post("/v1/chat/completions", json=BODY)
        choice = response.json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"].strip() == "Let me see."
        (call,) = choice["message"]["tool_calls"]
        assert call["type"] == "function"
        assert call["id"].startswith("call_")
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}

    async def test_calls_in_llamas_words_are_parsed_and_streamed(self, api, engine, monkeypatch):
        monkeypatch.setattr(ByteCodec, "tool_format", "llama")
        engine.text = LLAMA
        whole = await api.post("/v1/chat/completions", json=BODY)
        choice = whole.json()["choices"][0]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        streamed = await api.post("/v1/chat/completions", json={**BODY, "stream": True})
        lines = [part[6:] for part in streamed.text.split("\n\n") if part.startswith("data: {")]
        choices = [json.loads(line)["choices"][0] for line in lines]
        parts = [p for c in choices for p in c["delta"].get("tool_calls", ())]
        assert [part["function"].get("name") for part in parts] == ["weather", None]
        assert parts[1]["function"]["arguments"] == '{"city": "Rome"}'
        assert not any(choice["delta"].get("content") for choice in choices)

    @pytest.mark.parametrize("mark", [None, ord("#")])
    async def test_calls_in_mistrals_words_are_parsed_and_streamed(
        self, api, engine, monkeypatch, mark
    ):
        """The mark is text, or a control token, which no other text shows."""
        monkeypatch.setattr(ByteCodec, "tool_format", "mistral")
        engine.text = f"See: [TOOL_CALLS][{ONE}, {ONE}]"
        if mark is not None:
            _make_mark(monkeypatch, mark)
            engine.text = f"See: #[{ONE}, {ONE}]"
        whole = await api.post("/v1/chat/completions", json=BODY)
        choice = whole.json()["choices"][0]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "See:")
        written = [call["function"]["arguments"] for call in choice["message"]["tool_calls"]]
        assert written == ['{"city": "Rome"}'] * 2
        streamed = await api.post("/v1/chat/completions", json={**BODY, "stream": True})
        lines = [part[6:] for part in streamed.text.split("\n\n") if part.startswith("data: {")]
        choices = [json.loads(line)["choices"][0] for line in lines]
        parts = [p for c in choices for p in c["delta"].get("tool_calls", ())]
        assert [part["index"] for part in parts] == [0, 0, 1, 1]
        assert "".join(c["delta"].get("content") or "" for c in choices) == "See:"

    async def test_a_control_token_that_opens_calls_is_no_text_without_tools(
        self, api, engine, monkeypatch
    ):
        monkeypatch.setattr(ByteCodec, "tool_format", "mistral")
        _make_mark(monkeypatch, ord("#"))
        engine.text = "a#b"
        body = {key: value for key, value in BODY.items() if key != "tools"}
        answer = (await api.post("/v1/chat/completions", json=body)).json()
        assert answer["choices"][0]["message"]["content"] == "ab"

    async def test_llamas_bare_json_excludes_other_json(self, api, engine, monkeypatch):
        monkeypatch.setattr(ByteCodec, "tool_format", "llama")
        body = {**BODY, "response_format": {"type": "json_object"}}
        error = (await api.post("/v1/chat/completions", json=body)).json()["error"]
        assert (error["param"], error["code"]) == ("response_format", "unsupported_parameter")
        forced = await api.post("/v1/chat/completions", json={**body, "tool_choice": "required"})
        assert forced.status_code == 200

    @pytest.mark.usefixtures("_tools")
    async def test_malformed_calls_are_content(self, api, engine):
        engine.text = "<tool_call>{oops</tool_call>"
        choice = (await api.post("/v1/chat/completions", json=BODY)).json()["choices"][0]
        assert choice["message"]["content"] == engine.text
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"

    @pytest.mark.usefixtures("_tools")
    async def test_streams_tell_the_call_then_its_arguments(self, api, engine):
        engine.text = f"{CALL}\n{CALL}"
        response = await api.post("/v1/chat/completions", json={**BODY, "stream": True})
        lines = [line[6:] for line in response.text.split("\n\n") if line and "[DONE]" not in line]
        choices = [json.loads(line)["choices"][0] for line in lines]
        parts = [p for c in choices for p in c["delta"].get("tool_calls", ())]
        assert [part["index"] for part in parts] == [0, 0, 1, 1]
        assert [part["function"].get("name") for part in parts] == ["weather", None] * 2
        assert "".join(p["function"]["arguments"] for p in parts) == '{"city": "Rome"}' * 2
        assert choices[-1]["finish_reason"] == "tool_calls"
        assert not any(choice["delta"].get("content") for choice in choices)

    @pytest.mark.usefixtures("_tools")
    async def test_a_forced_call_gives_the_engine_a_grammar(self, api, engine):
        await api.post("/v1/chat/completions", json={**BODY, "tool_choice": "required"})
        assert engine.requests[0].grammar.kind == "lark"

    @pytest.mark.usefixtures("_tools")
    async def test_a_cut_call_ends_with_length(self, api, engine):
        engine.text = CALL
        response = await api.post("/v1/chat/completions", json={**BODY, "max_tokens": 20})
        choice = response.json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["content"] == CALL[:20]
