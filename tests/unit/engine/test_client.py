"""The client against an engine that misbehaves: a socket on which the test plays the engine."""

import asyncio
from dataclasses import replace

import pytest
import zmq
import zmq.asyncio

from engine import client as client_module
from engine import wire
from engine.client import ClientTimes, EngineClient
from engine.errors import EngineUnavailable, RequestRefused
from engine.types import PROTOCOL_VERSION, RequestOutput, RequestUsage
from tests.engine_process import describe, make_request

USAGE = RequestUsage(3, 0, 1, 0.0, 0.0, 1.0, 1.0)
BEAT = wire.Beat("e1", ready=True, turns=0, pending=False, draining=False)
TIMES = ClientTimes(connect_s=5.0, dead_after_s=30.0, hung_after_s=30.0, retry_s=0.01)


class PlayedEngine:
    """Answers hello and nothing else by itself."""

    def __init__(self, address):
        self._context = zmq.asyncio.Context()
        self.router = self._context.socket(zmq.ROUTER)
        self.router.bind(address)
        self.peer = b""

    async def receive(self, kind):
        """The next message of that kind."""
        while True:
            self.peer, *frames = await self.router.recv_multipart()
            message = wire.decode_from_client(frames)
            if isinstance(message, kind):
                return message

    async def welcome(self, protocol=PROTOCOL_VERSION, beat=BEAT):
        hello = await self.receive(wire.Hello)
        await self.send(wire.Welcome(protocol, "e1", 20.0))
        await self.send(beat)
        return hello

    async def send(self, message):
        await self.router.send_multipart([self.peer, *wire.encode(message)])

    def close(self):
        self._context.destroy(linger=0)


@pytest.fixture
async def engine(tmp_path):
    played = PlayedEngine(f"ipc://{tmp_path}/e")
    yield played
    played.close()


@pytest.fixture
async def client(engine, tmp_path):
    opened = EngineClient(f"ipc://{tmp_path}/e", times=TIMES)
    await opened.start()
    yield opened
    await opened.close()


async def start(client, engine, request):
    """The iterator's first step under way, after the engine has the request."""
    stream = client.generate(request)
    first = asyncio.create_task(anext(stream))
    await engine.receive(wire.Generate)
    return stream, first


async def read_into(outputs, stream):
    async for output in stream:
        outputs.append(output)


class TestLostMessages:
    async def test_a_gap_in_the_sequence_fails_the_request_and_cancels_it(self, client, engine):
        await engine.welcome()
        stream, first = await start(client, engine, make_request("r"))
        await engine.send(wire.Outputs([RequestOutput("r", 0)]))
        await first
        await engine.send(wire.Outputs([RequestOutput("r", 2)]))
        with pytest.raises(EngineUnavailable) as lost:
            await anext(stream)
        assert lost.value.code == "engine_message_lost"
        assert (await engine.receive(wire.Cancel)).request_id == "r"

    async def test_a_session_that_the_engine_ended_fails_what_is_in_flight(self, client, engine):
        before = await engine.welcome()
        _, first = await start(client, engine, make_request("r"))
        await engine.send(wire.Stranger())
        with pytest.raises(EngineUnavailable, match="ended this client's session"):
            await first
        assert (await engine.welcome()).client_id != before.client_id

    async def test_what_the_client_cannot_read_ends_the_connection_and_not_the_client(
        self, client, engine
    ):
        await engine.welcome()
        _, first = await start(client, engine, make_request("r"))
        await engine.router.send_multipart([engine.peer, b"outputs", b"\xc1"])
        with pytest.raises(EngineUnavailable, match="does not read"):
            await first
        await engine.welcome()
        _, again = await start(client, engine, make_request("r2"))
        await engine.send(wire.Outputs([RequestOutput("r2", 0, usage=USAGE)]))
        assert (await again).usage == USAGE

    async def test_outputs_of_unknown_requests_are_dropped(self, client, engine):
        await engine.welcome()
        _, first = await start(client, engine, make_request("r"))
        await engine.send(wire.Outputs([RequestOutput("x", 5), RequestOutput("r", 0)]))
        assert (await first).request_id == "r"


class TestBounds:
    async def test_a_reader_that_is_too_slow_loses_its_request_alone(
        self, client, engine, monkeypatch
    ):
        monkeypatch.setattr(client_module, "MAX_BUFFERED_OUTPUTS", 5)
        await engine.welcome()
        stream, first = await start(client, engine, make_request("r"))
        outputs = [RequestOutput("r", index) for index in range(100)]
        await engine.send(wire.Outputs(outputs))
        assert (await engine.receive(wire.Cancel)).request_id == "r"
        read = [await first]
        with pytest.raises(EngineUnavailable) as slow:
            await read_into(read, stream)
        assert slow.value.code == "reader_too_slow"
        assert len(read) == 5

    async def test_numbers_that_are_not_finite_never_leave(self, client, engine):
        await engine.welcome()
        request = make_request("r")
        sampling = replace(request.sampling, temperature=float("nan"))
        with pytest.raises(RequestRefused, match="finite"):
            await anext(client.generate(replace(request, sampling=sampling)))

    async def test_the_same_id_twice_is_refused_before_it_is_sent(self, client, engine):
        await engine.welcome()
        _, first = await start(client, engine, make_request("r"))
        with pytest.raises(RequestRefused) as refused:
            await anext(client.generate(make_request("r")))
        assert refused.value.code == "duplicate_request_id"
        first.cancel()

    def test_an_address_that_is_too_long_is_refused_with_the_remedy(self):
        with pytest.raises(Exception, match="LORAMUX_ENGINES"):
            EngineClient("ipc:///" + "x" * 120)


class TestLife:
    async def test_another_protocol_version_is_said_in_words(self, client, engine):
        await engine.welcome(protocol=99)
        with pytest.raises(EngineUnavailable, match="protocol 99"):
            await client.describe(timeout_s=0.5)

    async def test_a_loading_engine_is_waited_for(self, client, engine):
        await engine.welcome(beat=replace(BEAT, ready=False))
        asking = asyncio.create_task(client.describe())
        await asyncio.sleep(0.05)
        assert not asking.done()
        await engine.send(BEAT)
        call = await engine.receive(wire.Call)
        await engine.send(wire.Reply(call.number, description=describe()))
        assert (await asking).name == "invented"

    async def test_pings_keep_the_session(self, client, engine):
        await engine.welcome()
        await engine.receive(wire.Ping)
        await engine.receive(wire.Ping)

    async def test_a_question_without_an_answer_times_out(self, engine, tmp_path):
        times = replace(TIMES, call_s=0.1)
        other = EngineClient(f"ipc://{tmp_path}/e", times=times)
        await other.start()
        await engine.welcome()
        with pytest.raises(EngineUnavailable, match="no answer"):
            await other.status()
        await other.close()

    async def test_close_says_goodbye(self, client, engine):
        await engine.welcome()
        await engine.receive(wire.Ping)
        await client.close()
        await engine.receive(wire.Bye)
