"""What comes over the sockets is what was sent, or is refused."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import wire
from engine.errors import (
    AdapterMissing,
    EngineError,
    EngineUnavailable,
    NotStarted,
    RequestRefused,
)
from engine.types import (
    AdapterRef,
    GenerateRequest,
    LatencyBudget,
    RequestOutput,
    RequestUsage,
    SamplingParams,
    TokenLogprobs,
)

REQUEST = GenerateRequest(
    request_id="req_1",
    tenant="ten_1",
    prompt=[1, 2, 3],
    sampling=SamplingParams(max_tokens=4, logit_bias={7: -1.5}, stop_token_ids=(2,), logprobs=2),
    cache_salt="s",
    adapter=AdapterRef("a" * 16, "d" * 64),
    budget=LatencyBudget(ttft_ms=100.0),
)


def packed(value):
    return msgspec.msgpack.encode(value)


class TestRoundTrip:
    @pytest.mark.parametrize(
        "message",
        [
            wire.Hello(1, "c"),
            wire.Ping(),
            wire.Bye(),
            wire.Generate(REQUEST),
            wire.Cancel("req_1"),
            wire.Call(3, "forget", AdapterRef("a", "b")),
            wire.Call(3, "journal", request_ids=["req_1"]),
        ],
    )
    def test_clients_messages_arrive_as_they_were_sent(self, message):
        assert wire.decode_from_client(wire.encode(message)) == message

    @pytest.mark.parametrize(
        "message",
        [
            wire.Welcome(1, "e", 500.0),
            wire.Beat("e", True, 7, True, False),
            wire.Stranger(),
            wire.Refused("req_1", wire.Problem("RequestRefused", "queue_full", "full", "x")),
            wire.Reply(1, forgotten=True),
            wire.Failed(1, wire.Problem("EngineError", "x", "y")),
            wire.Outputs(
                [
                    RequestOutput(
                        "req_1",
                        0,
                        token_ids=[5],
                        logprobs=[TokenLogprobs(5, -0.5, [(5, -0.5), (6, -1.0)])],
                        finish="stop",
                        usage=RequestUsage(3, 0, 1, 0.5, 0.0, None, 2.0),
                    )
                ]
            ),
        ],
    )
    def test_the_engines_messages_arrive_as_they_were_sent(self, message):
        assert wire.decode_from_engine(wire.encode(message)) == message


class TestRefusals:
    @given(st.lists(st.binary(max_size=64), max_size=4))
    @settings(max_examples=300)
    def test_noise_is_a_wire_error_and_nothing_else(self, frames):
        with pytest.raises(wire.WireError):
            wire.decode_from_client([b"generate", *frames])

    @pytest.mark.parametrize(
        "frames",
        [
            [],
            [b"ping"],
            [b"ping", packed({}), b"more"],
            [b"outputs", packed({"outputs": []})],  # a kind of the other direction
            [b"unknown", packed({})],
            [b"hello", packed({"protocol": "one", "client_id": "c"})],
            [b"hello", packed({"protocol": 1})],
            [b"cancel", packed({"request_id": ""})],
            [b"cancel", packed({"request_id": "x" * 129})],
            [b"call", packed({"number": 1, "name": "shutdown"})],
            [b"call", packed({"number": 1, "name": "journal", "request_ids": ["x"] * 100_001})],
            [b"hello", b"\x81" * 100_000],
            [b"hello", b"\xc7\x01\x05x"],  # an extension type
        ],
    )
    def test_what_the_protocol_does_not_know_is_refused(self, frames):
        with pytest.raises(wire.WireError):
            wire.decode_from_client(frames)

    @pytest.mark.parametrize("token", [-1, 2**31, 2**70])
    def test_a_token_id_out_of_range_is_refused(self, token):
        body = packed(wire.Generate(REQUEST)).replace(packed([1, 2, 3]), packed_list(token))
        with pytest.raises(wire.WireError):
            wire.decode_from_client([b"generate", body])

    @pytest.mark.parametrize(
        "sampling",
        [
            SamplingParams(max_tokens=1, temperature=float("nan")),
            SamplingParams(max_tokens=1, logit_bias={1: float("inf")}),
        ],
    )
    def test_numbers_that_are_not_finite_are_refused(self, sampling):
        request = GenerateRequest("r", "t", [1], sampling, "s")
        with pytest.raises(wire.WireError, match="finite"):
            wire.decode_from_client(wire.encode(wire.Generate(request)))


def packed_list(token):
    """[token, 2, 3]; msgpack has no integers of more than 64 bits, so those go as a string."""
    return packed([token if abs(token) < 2**63 else str(token), 2, 3])


class TestErrors:
    @pytest.mark.parametrize(
        "error",
        [
            RequestRefused("too long", code="prompt_too_long", field="messages"),
            AdapterMissing("gone"),
            EngineUnavailable("away", code="draining"),
            NotStarted("elsewhere", code="draining"),
            EngineError("other"),
        ],
    )
    def test_an_error_keeps_class_code_and_field(self, error):
        arrived = wire.to_error(wire.to_problem(error))
        assert type(arrived) is type(error)
        assert (arrived.code, arrived.message, arrived.field) == (
            error.code,
            error.message,
            error.field,
        )

    def test_a_class_of_one_side_alone_travels_as_its_base(self):
        class Special(RequestRefused):
            code = "special"

        arrived = wire.to_error(wire.to_problem(Special("x")))
        assert type(arrived) is RequestRefused
        assert arrived.code == "special"
