"""The engine as a process: streams, deaths, hangs, rogue clients. Its core invents the tokens."""

import asyncio
import signal
import subprocess
import sys
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from engine import wire
from engine.client import ClientTimes, EngineClient, create_curve_keys, load_client_curve
from engine.errors import EngineUnavailable, NotStarted, RequestRefused
from engine.types import PROTOCOL_VERSION, AdapterRef
from tests.engine_process import (
    CRASH_TOKEN,
    HANG_TOKEN,
    EngineProcess,
    free_tcp_address,
    make_request,
)

FAST = ClientTimes(connect_s=10.0, dead_after_s=1.0, hung_after_s=0.5, retry_s=0.05)


@pytest.fixture
def process(tmp_path):
    engine = EngineProcess(tmp_path).start()
    yield engine
    engine.stop()


@asynccontextmanager
async def connected(address, times=FAST, **options):
    client = EngineClient(address, times=times, **options)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture
async def client(process):
    async with connected(process.address) as opened:
        await opened.describe()
        yield opened


async def collect(client, request):
    return [output async for output in client.generate(request)]


async def begin(client, request):
    """An iterator from which the first output has been read, so that the request runs."""
    stream = client.generate(request)
    await anext(stream)
    return stream


async def until(condition):
    """Polls; the test's own time-out ends it."""
    while not await condition():  # noqa: ASYNC110 - the state lies in another process
        await asyncio.sleep(0.02)


class TestStreams:
    async def test_outputs_arrive_in_order_with_the_usage_last(self, client):
        outputs = await collect(client, make_request("r", max_tokens=5))
        assert [output.token_ids for output in outputs] == [[10], [11], [12], [13], [14]]
        assert [output.usage is not None for output in outputs] == [False] * 4 + [True]
        assert outputs[-1].usage.completion_tokens == 5

    async def test_a_hundred_requests_at_once_all_end(self, client):
        requests = [make_request(f"r{index}", 20, first_token=index) for index in range(100)]
        answers = await asyncio.gather(*(collect(client, request) for request in requests))
        for index, outputs in enumerate(answers):
            tokens = [token for output in outputs for token in output.token_ids]
            assert tokens == list(range(index, index + 20))

    async def test_a_refusal_comes_with_its_code_and_field(self, client):
        with pytest.raises(RequestRefused) as refused:
            await collect(client, replace(make_request("r"), prompt=[]))
        assert (refused.value.code, refused.value.field) == ("prompt_empty", "prompt")
        assert await client.journal(["r"]) == []

    async def test_an_id_in_use_is_refused_and_the_first_goes_on(self, client, process):
        stream = await begin(client, make_request("r", 10_000))
        async with connected(process.address) as other:
            with pytest.raises(RequestRefused) as refused:
                await collect(other, make_request("r"))
        assert refused.value.code == "duplicate_request_id"
        assert (await anext(stream)).token_ids
        await stream.aclose()

    async def test_cancel_brings_the_last_output_with_the_usage(self, client):
        stream = await begin(client, make_request("r", 10_000))
        await client.cancel("r")
        outputs = [output async for output in stream]
        assert outputs[-1].finish == "cancelled"
        assert outputs[-1].usage.completion_tokens == 1 + sum(len(o.token_ids) for o in outputs)

    async def test_one_choice_can_be_cancelled_alone(self, client):
        stream = await begin(client, make_request("r", 10_000))
        await client.cancel("r", 1)  # there is none such
        await client.status()
        assert (await client.status()).running == 1
        await client.cancel("r", 0)
        outputs = [output async for output in stream]
        assert outputs[-1].finish == "cancelled"

    async def test_closing_the_iterator_cancels_in_the_engine(self, client):
        async with aclosing(await begin(client, make_request("r", 10_000))):
            assert (await client.status()).running == 1

        async def idle():
            return (await client.status()).running == 0

        await until(idle)
        [entry] = await client.journal(["r"])
        assert entry.finish == "cancelled"

    async def test_one_client_cannot_cancel_anothers_request(self, client, process):
        stream = await begin(client, make_request("r", 10_000))
        async with connected(process.address) as other:
            await other.describe()
            await other.cancel("r")
            await other.status()  # the engine has taken the message by now
            assert (await other.status()).running == 1
        await stream.aclose()


class TestQuestions:
    async def test_status_names_the_engine_of_this_start(self, client):
        assert (await client.status()).engine_id == client.engine_id

    async def test_forget_reaches_the_core(self, client):
        assert await client.forget(AdapterRef("a" * 16, "d" * 64))

    async def test_the_journal_answers_until_it_is_acknowledged(self, client):
        await collect(client, make_request("r", max_tokens=5))
        [entry] = await client.journal(["r", "unknown"])
        assert (entry.prompt_tokens, entry.completion_tokens, entry.finish) == (3, 5, "length")
        await client.acknowledge(["r"])
        assert await client.journal(["r"]) == []

    async def test_the_warm_up_leaves_no_trace_in_the_journal(self, client):
        assert await client.journal([f"warm-up-{client.engine_id}"]) == []


class TestDeath:
    async def test_kill_9_fails_what_is_in_flight_and_the_journal_has_the_counts(
        self, process, client
    ):
        stream = await begin(client, make_request("r", 10_000))

        async def written():
            return b'"r":"r"' in (process.folder / "journal").read_bytes()

        await until(written)
        process.kill()
        with pytest.raises(EngineUnavailable):
            async for _ in stream:
                pass
        assert not client.alive
        before = client.engine_id
        process.start()
        await client.describe()
        assert client.engine_id != before
        [entry] = await client.journal(["r"])
        assert entry.finish == "error"
        assert entry.prompt_tokens == 3
        assert len(await collect(client, make_request("again", 3))) == 3

    async def test_a_fault_of_the_core_ends_the_process_with_a_status(self, process, client):
        with pytest.raises(EngineUnavailable):
            await collect(client, make_request("r", first_token=CRASH_TOKEN))
        assert await process.exit_status() == 1

    async def test_a_request_without_an_engine_fails_with_the_reason(self, tmp_path):
        tmp_path.chmod(0o700)
        times = ClientTimes(connect_s=0.2)
        async with connected(f"ipc://{tmp_path}/nobody.sock", times) as client:
            with pytest.raises(EngineUnavailable, match="not answered"):
                await collect(client, make_request("r"))

    async def test_closing_the_client_fails_what_is_in_flight(self, client, process):
        stream = await begin(client, make_request("r", 10_000))
        await client.close()
        with pytest.raises(EngineUnavailable):
            async for _ in stream:
                pass
        async with connected(process.address) as other:

            async def idle():
                return (await other.status()).running == 0

            await until(idle)


class TestHang:
    async def test_a_stopped_process_is_noticed_by_its_silence(self, process, client):
        stream = await begin(client, make_request("r", 10_000))
        process.signal(signal.SIGSTOP)
        with pytest.raises(EngineUnavailable, match="sign of life"):
            async for _ in stream:
                pass
        process.signal(signal.SIGCONT)
        assert (await client.describe()).name == "invented"

    async def test_a_step_that_does_not_end_is_told_from_a_dead_process(self, process, client):
        stream = client.generate(make_request("r", first_token=HANG_TOKEN))
        with pytest.raises(EngineUnavailable) as unavailable:
            await anext(stream)
        assert unavailable.value.code == "engine_hung"
        assert client.hung
        assert not client.alive
        assert client.engine_id is not None
        with pytest.raises(EngineUnavailable):
            await collect(client, make_request("other"))

    async def test_an_idle_engine_does_not_hang_and_rests(self, process, client):
        before = process.cpu_seconds()
        await asyncio.sleep(1.5)
        assert client.alive
        assert process.cpu_seconds() - before < 0.75


class TestDrain:
    async def test_sigterm_lets_answers_end_and_takes_no_new_ones(self, process, client):
        stream = await begin(client, make_request("r", 100))
        process.signal(signal.SIGTERM)

        async def draining():
            return client.draining

        await until(draining)
        assert not client.alive
        outputs = [output async for output in stream]
        assert outputs[-1].finish == "length"
        assert await process.exit_status() == 0

    async def test_a_drain_by_call_refuses_new_ones_until_resume_and_ends_nothing(self, client):
        stream = await begin(client, make_request("r", 60))
        await client.drain()
        with pytest.raises(NotStarted) as refusal:
            await collect(client, make_request("other"))
        assert refusal.value.code == "draining"
        assert (await client.status()).held
        assert [output async for output in stream][-1].finish == "length"
        assert (await client.describe()).name == "invented"
        await client.resume()

        async def alive():
            return client.alive

        await until(alive)
        assert len(await collect(client, make_request("other", 3))) == 3

    async def test_an_idle_engine_ends_at_once(self, process, client):
        process.signal(signal.SIGTERM)
        assert await process.exit_status() == 0

    async def test_a_second_engine_on_the_address_says_so_and_leaves(self, process, client):
        command = [sys.executable, "-m", "tests.engine_process", process.address]
        second = await asyncio.to_thread(
            subprocess.run,
            [*command, str(process.folder / "journal"), "1", "20"],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            check=False,
        )
        assert second.returncode != 0
        assert b"another engine listens" in second.stderr
        assert len(await collect(client, make_request("r", 3))) == 3


@asynccontextmanager
async def raw_socket(address):
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(address)
    try:
        yield dealer
    finally:
        context.destroy(linger=0)


async def say_hello(dealer, client_id="raw"):
    await dealer.send_multipart(wire.encode(wire.Hello(PROTOCOL_VERSION, client_id)))
    assert isinstance(await next_of(dealer, wire.Welcome), wire.Welcome)


async def next_of(dealer, kind):
    while True:
        message = wire.decode_from_engine(await dealer.recv_multipart())
        if isinstance(message, kind):
            return message


class TestClientsThatMisbehave:
    async def test_a_vanished_client_is_cancelled_within_two_steps(self, process, client):
        async with raw_socket(process.address) as dealer:
            await say_hello(dealer)
            await dealer.send_multipart(wire.encode(wire.Generate(make_request("r", 10_000))))
            await next_of(dealer, wire.Outputs)
        steps = (await client.status()).steps

        async def idle():
            return (await client.status()).running == 0

        await until(idle)
        [entry] = await client.journal(["r"])
        assert entry.finish == "cancelled"
        # a step may have begun before the socket closed, and one ran to find that out
        assert (await client.status()).steps <= steps + 2

    async def test_a_client_that_reads_but_says_nothing_is_cancelled(self, process, client):
        async with raw_socket(process.address) as dealer:
            await say_hello(dealer)
            await dealer.send_multipart(wire.encode(wire.Generate(make_request("r", 100_000))))
            reading = asyncio.create_task(next_of(dealer, wire.Failed))

            async def idle():
                return (await client.status()).running == 0

            async def running():
                return not await idle()

            await until(running)
            await until(idle)
            reading.cancel()

    async def test_a_client_that_reads_nothing_is_dropped(self, tmp_path):
        engine = EngineProcess(tmp_path, step_ms=0.2, outbox_messages=20).start()
        try:
            async with connected(engine.address) as client, raw_socket(engine.address) as dealer:
                dealer.setsockopt(zmq.RCVHWM, 1)
                await client.describe()
                await say_hello(dealer)
                flood = make_request("r", 10**9)
                await dealer.send_multipart(wire.encode(wire.Generate(flood)))
                await next_of(dealer, wire.Outputs)

                async def dropped():
                    await dealer.send_multipart(wire.encode(wire.Ping()))  # alive, but not reading
                    return (await client.status()).running == 0

                await until(dropped)
                assert len(await collect(client, make_request("other", 3))) == 3
        finally:
            engine.stop()

    async def test_malformed_frames_do_not_stop_the_engine(self, process, client):
        stream = await begin(client, make_request("r", 10_000))
        noise = [
            [b""],
            [b"ping"],
            [b"nonsense", b"\xc1"],
            [b"generate", b"\xc1\xff"],
            [b"generate", msgspec.msgpack.encode({"request": {"prompt": "x" * 1_000_000}})],
            [b"outputs", msgspec.msgpack.encode({"outputs": []})],
            [b"hello", msgspec.msgpack.encode({"protocol": -1, "client_id": ""})],
            [b"x" * 100_000] * 50,
        ]
        async with raw_socket(process.address) as dealer:
            for frames in noise * 20:
                await dealer.send_multipart(frames)
            await say_hello(dealer)
        assert (await anext(stream)).token_ids
        await stream.aclose()

    async def test_a_peer_that_never_said_hello_gets_nothing(self, process, client):
        async with raw_socket(process.address) as dealer:
            await dealer.send_multipart(wire.encode(wire.Generate(make_request("r"))))
            assert isinstance(await next_of(dealer, wire.Stranger), wire.Stranger)
        assert await client.journal(["r"]) == []

    async def test_another_protocol_version_gets_no_session(self, process):
        async with raw_socket(process.address) as dealer:
            await dealer.send_multipart(wire.encode(wire.Hello(PROTOCOL_VERSION + 1, "c")))
            assert (await next_of(dealer, wire.Welcome)).protocol == PROTOCOL_VERSION
            await dealer.send_multipart(wire.encode(wire.Ping()))
            assert isinstance(await next_of(dealer, wire.Stranger), wire.Stranger)


class TestCurve:
    @pytest.fixture
    def keys(self, tmp_path):
        return create_curve_keys(tmp_path / "curve").public

    @pytest.fixture
    def remote(self, tmp_path, keys):
        engine = EngineProcess(tmp_path, curve_dir=tmp_path / "curve")
        engine.address = free_tcp_address()
        yield engine.start()
        engine.stop()

    async def test_a_client_of_the_allow_list_is_served(self, remote, tmp_path, keys):
        curve = load_client_curve(tmp_path / "curve", keys)
        async with connected(remote.address, curve=curve) as client:
            assert len(await collect(client, make_request("r", 3))) == 3

    async def test_a_client_whose_key_is_not_on_the_list_is_refused(self, remote, tmp_path, keys):
        stranger = create_curve_keys(tmp_path / "stranger")
        assert stranger.public != keys
        curve = load_client_curve(tmp_path / "stranger", keys)
        times = ClientTimes(connect_s=3.0)
        async with connected(remote.address, times, curve=curve) as client:
            with pytest.raises(EngineUnavailable, match=r"clients\.allowed"):
                await client.describe(timeout_s=3.0)

    async def test_a_client_without_keys_gets_no_answer(self, remote, tmp_path, keys):
        allowed = load_client_curve(tmp_path / "curve", keys)
        async with connected(remote.address, curve=allowed) as client:
            await client.describe()
            async with connected(remote.address, ClientTimes(connect_s=0.5)) as bare:
                with pytest.raises(EngineUnavailable):
                    await bare.describe(timeout_s=0.5)
            assert client.alive
