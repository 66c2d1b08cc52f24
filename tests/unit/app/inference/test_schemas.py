"""Every parameter is honoured or refused by name, with the remedy in the sentence."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import InvalidRequest
from app.inference.documentation import CHAT_BODY, COMPLETION_BODY
from app.inference.schemas import chat_call, completion_call, read_json
from app.settings import Settings

HELLO = [{"role": "user", "content": "hello"}]


def chat(settings, **changes):
    return chat_call({"model": "m", "messages": HELLO, **changes}, settings)


def completion(settings, **changes):
    return completion_call({"model": "m", "prompt": "hello", **changes}, settings)


UNKNOWN = "unknown_parameter"


def outcome(parse, *args, **changes):
    """("parsed",), or ("refused", field, code); anything else is a failure of the parser."""
    try:
        parse(*args, **changes)
    except InvalidRequest as error:
        return "refused", error.param, error.code
    return ("parsed",)


def refusal(parse, settings, **changes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(settings, **changes)
    return caught.value


class TestHonoured:
    def test_every_sampling_parameter_reaches_the_call(self, settings):
        sampling = chat(
            settings,
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            min_p=0.05,
            repetition_penalty=1.1,
            presence_penalty=0.3,
            frequency_penalty=-0.2,
            logit_bias={"7": -100, "8": 2.5},
            logprobs=True,
            top_logprobs=3,
            seed=-1,
            stop=["a", "b"],
            max_completion_tokens=9,
        ).sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 40)
        assert (sampling.min_p, sampling.repetition_penalty) == (0.05, 1.1)
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.3, -0.2)
        assert sampling.logit_bias == {7: -100.0, 8: 2.5}
        assert (sampling.logprobs, sampling.max_tokens, sampling.stop) == (3, 9, ("a", "b"))
        assert sampling.seed == 2**63 - 1  # never negative in the engine

    def test_text_parts_are_joined_and_developer_is_system(self, settings):
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        messages = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}]
        assert chat(settings, messages=messages).messages == (
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": "ab"},
        )

    def test_a_message_that_the_sdk_returned_can_be_sent_back(self, settings):
        answer = {
            "role": "assistant",
            "content": "hi",
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
            "tool_calls": None,
        }
        assert chat(settings, messages=[*HELLO, answer]).messages[-1]["content"] == "hi"

    def test_the_inert_parameters_are_accepted(self, settings):
        chat(
            settings,
            user="u",
            metadata={"a": "b"},
            store=False,
            service_tier="auto",
            parallel_tool_calls=True,
            prompt_cache_key="k",
            safety_identifier="s",
            response_format={"type": "text"},
        )

    def test_null_is_absent(self, settings):
        call = chat(settings, temperature=None, stop=None, tools=None, max_tokens=None)
        assert call.sampling.temperature == 1.0

    def test_prompts_may_be_text_or_token_ids(self, settings):
        assert completion(settings, prompt=["only one"]).text == "only one"
        assert completion(settings, prompt=[1, 2]).token_ids == (1, 2)
        assert completion(settings, prompt=[[1, 2]]).token_ids == (1, 2)
        assert completion(settings, logprobs=0).sampling.logprobs == 0

    def test_neutral_values_of_refused_parameters_pass(self, settings):
        completion(settings, echo=False, best_of=1, suffix=None)


REFUSED_CHAT = [
    # changes, param, code
    ({"temprature": 1}, "temprature", "unknown_parameter"),
    ({"temperature": 2.1}, "temperature", "invalid_value"),
    ({"temperature": "1"}, "temperature", "invalid_value"),
    ({"temperature": True}, "temperature", "invalid_value"),
    ({"temperature": 10**400}, "temperature", "invalid_value"),
    ({"top_p": -0.1}, "top_p", "invalid_value"),
    ({"top_k": 1.5}, "top_k", "invalid_value"),
    ({"min_p": 2}, "min_p", "invalid_value"),
    ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    ({"presence_penalty": 3}, "presence_penalty", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 9}, "n", "invalid_value"),
    ({"seed": 2**63}, "seed", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": "many"}, "max_tokens", "invalid_value"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "invalid_value"),
    ({"stop": ["a"] * 5}, "stop", "invalid_value"),
    ({"stop": ["a", ""]}, "stop[1]", "invalid_value"),
    ({"stop": "a" * 257}, "stop", "invalid_value"),
    ({"stop": 7}, "stop", "invalid_value"),
    ({"logit_bias": {"x": 1}}, "logit_bias['x']", "invalid_value"),
    ({"logit_bias": {"1": 101}}, "logit_bias['1']", "invalid_value"),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias", "invalid_value"),
    ({"logit_bias": [1]}, "logit_bias", "invalid_value"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"logprobs": 2}, "logprobs", "invalid_value"),
    ({"stream": "yes"}, "stream", "invalid_value"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    (
        {"stream": True, "stream_options": {"other": 1}},
        "stream_options.other",
        "unknown_parameter",
    ),
    ({"store": True}, "store", "unsupported_parameter"),
    ({"service_tier": "flex"}, "service_tier", "unsupported_parameter"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"functions": [{}]}, "functions", "tools_unsupported"),
    ({"function_call": "auto"}, "function_call", "tools_unsupported"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "unsupported_parameter"),
    ({"modalities": ["audio"]}, "modalities", "unsupported_parameter"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "unsupported_parameter"),
    ({"echo": True}, "echo", "unknown_parameter"),
    ({"loramux": {"ttft": 1}}, "loramux.ttft", "unknown_parameter"),
    ({"loramux": {"ttft_ms": 0}}, "loramux.ttft_ms", "invalid_value"),
    ({"loramux": 5}, "loramux", "invalid_value"),
    ({"model": ""}, "model", "missing_parameter"),
    ({"model": None}, "model", "missing_parameter"),
    ({"model": 5}, "model", "invalid_value"),
    ({"messages": None}, "messages", "missing_parameter"),
    ({"messages": []}, "messages", "empty_messages"),
    ({"messages": "hello"}, "messages", "invalid_value"),
    ({"messages": HELLO * 513}, "messages", "invalid_value"),
    ({"messages": ["hello"]}, "messages[0]", "invalid_value"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": {}, "content": "x"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "tools_unsupported"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_value"),
    ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content", "empty_message"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "empty_message"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
        "unsupported_parameter",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
        "invalid_value",
    ),
    (
        {"messages": [{"role": "user", "content": "x", "name": "bob"}]},
        "messages[0].name",
        "unsupported_parameter",
    ),
    (
        {"messages": [{"role": "user", "content": "x", "extra": 1}]},
        "messages[0].extra",
        "unknown_parameter",
    ),
    (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0].id",
        "invalid_value",
    ),
]

REFUSED_COMPLETION = [
    ({"echo": True}, "echo", "unsupported_parameter"),
    ({"best_of": 2}, "best_of", "unsupported_parameter"),
    ({"suffix": "end"}, "suffix", "unsupported_parameter"),
    ({"prompt": None}, "prompt", "missing_parameter"),
    ({"prompt": ""}, "prompt", "empty_prompt"),
    ({"prompt": []}, "prompt", "empty_prompt"),
    ({"prompt": ["a", "b"]}, "prompt", "unsupported_parameter"),
    ({"prompt": [1, -1]}, "prompt[1]", "invalid_value"),
    ({"prompt": [1, "a"]}, "prompt[1]", "invalid_value"),
    ({"prompt": 5}, "prompt", "invalid_value"),
    ({"logprobs": 6}, "logprobs", "invalid_value"),
    ({"logprobs": True}, "logprobs", "invalid_value"),
    ({"messages": HELLO}, "messages", "unknown_parameter"),
]


class TestRefused:
    @pytest.mark.parametrize(("changes", "param", "code"), REFUSED_CHAT)
    def test_chat_names_the_field(self, settings, changes, param, code):
        error = refusal(chat, settings, **changes)
        assert (error.param, error.code, error.status) == (param, code, 400)
        assert error.message.startswith(param)

    @pytest.mark.parametrize(("changes", "param", "code"), REFUSED_COMPLETION)
    def test_completions_name_the_field(self, settings, changes, param, code):
        error = refusal(completion, settings, **changes)
        assert (error.param, error.code, error.status) == (param, code, 400)

    def test_message_content_is_never_quoted(self, settings):
        secret = "the-secret-canary"
        for messages in (
            [{"role": secret, "content": "x"}],
            [{"role": "user", "content": {secret: secret}}],
            [secret],
        ):
            assert secret not in refusal(chat, settings, messages=messages).message

    @given(
        st.dictionaries(
            st.sampled_from(
                sorted(
                    CHAT_BODY["requestBody"]["content"]["application/json"]["schema"]["properties"]
                )
            ),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                lambda inner: (
                    st.lists(inner, max_size=3)
                    | st.dictionaries(st.text(max_size=5), inner, max_size=3)
                ),
                max_leaves=6,
            ),
        )
    )
    def test_whatever_is_sent_is_a_call_or_a_refusal_with_a_field(self, body):
        bounds = Settings()
        for parse in (chat_call, completion_call):
            assert outcome(parse, body, bounds)[:2] != ("refused", None)


class TestJson:
    @pytest.mark.parametrize(
        "body",
        [b"", b"{", b"[1, 2]", b'"text"', b"\xff\xfe", b'{"a": NaN}', b"[" * 100_000, b"null"],
    )
    def test_what_is_no_json_object_is_refused_as_such(self, body):
        with pytest.raises(InvalidRequest) as caught:
            read_json(body)
        assert caught.value.code == "invalid_json"

    def test_a_lone_surrogate_never_gets_in(self):
        with pytest.raises(InvalidRequest):
            read_json(b'{"model": "\\ud800"}')

    def test_numbers_of_any_length_are_refused_or_read(self):
        with pytest.raises(InvalidRequest):
            read_json(b'{"seed": ' + b"9" * 6000 + b"}")


class TestDocumentation:
    @pytest.mark.parametrize(("body", "parse"), [(CHAT_BODY, chat), (COMPLETION_BODY, completion)])
    def test_every_documented_parameter_is_known_to_the_parser(self, settings, body, parse):
        schema = body["requestBody"]["content"]["application/json"]["schema"]
        json.dumps(schema)
        for name in schema["properties"]:
            assert outcome(parse, settings, **{name: {"no": "value"}}) != ("refused", name, UNKNOWN)
