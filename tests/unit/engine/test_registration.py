"""What an engine writes of itself into Redis, and when it takes that back."""

import queue
import secrets
import time
from dataclasses import replace

import pytest
import redis

from engine.ipc import AddressRefused
from engine.registration import MEMBERS, Registrar, Registration, advertised, decode, key_of
from engine.types import AdapterRef, Residency
from tests.engine_process import InventedCore

URL = "redis://127.0.0.1:6379/12"
LINE = Registration("e1", "ipc:///run/e.sock", "tiny", "b" * 64)


class TestAddress:
    def test_it_is_where_the_engine_listens_unless_it_says_otherwise(self):
        assert advertised("ipc:///run/e.sock", None) == "ipc:///run/e.sock"
        assert advertised("tcp://0.0.0.0:5555", "tcp://gpu-1:5555") == "tcp://gpu-1:5555"

    @pytest.mark.parametrize("listen", ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://[::]:5555"])
    def test_an_address_that_nobody_can_connect_to_is_refused(self, listen):
        with pytest.raises(AddressRefused, match="--advertise"):
            advertised(listen, None)
        with pytest.raises(AddressRefused, match="neither"):
            advertised(listen, "gpu-1:5555")


def test_the_line_tells_load_and_how_many_adapters_lie_where():
    status = replace(
        InventedCore().status(),
        running=3,
        waiting=2,
        draining=True,
        adapters=[
            Residency(AdapterRef("s", digest), tier, 10, 0)
            for digest, tier in (("a", "device"), ("b", "device"), ("c", "host"))
        ],
    )
    line = LINE.with_load(status)
    assert (line.running, line.waiting, line.draining) == (3, 2, True)
    assert line.adapters == {"device": 2, "host": 1}


@pytest.mark.redis
class TestRegistrar:
    @pytest.fixture
    def store(self):
        client = redis.Redis.from_url(URL, decode_responses=True)
        yield client
        client.close()

    @staticmethod
    def until(condition):
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def test_it_writes_renews_and_takes_back_its_own_line_alone(self, store):
        line = replace(LINE, engine_id=secrets.token_hex(8))
        neighbour = f"other-{line.engine_id}"
        store.sadd(MEMBERS, neighbour)
        status = replace(InventedCore().status(), running=7)
        registrar = Registrar(URL, line, 400.0, lambda tell: tell(status))
        registrar.start()
        self.until(lambda: (text := store.get(key_of(line.engine_id))) and decode(text).running)
        assert 0 < store.pttl(key_of(line.engine_id)) <= 400
        assert store.sismember(MEMBERS, line.engine_id)
        registrar.close()
        assert not store.exists(key_of(line.engine_id))
        assert not store.sismember(MEMBERS, line.engine_id)
        assert store.srem(MEMBERS, neighbour) == 1

    def test_a_redis_that_is_away_ends_neither_the_thread_nor_the_engine(self):
        asked: queue.SimpleQueue[None] = queue.SimpleQueue()
        nobody = "redis://127.0.0.1:1/0"
        registrar = Registrar(nobody, LINE, 100.0, lambda _: asked.put(None))
        registrar.start()
        for _ in range(3):
            asked.get(timeout=10)
        assert registrar.is_alive()
        registrar.close()
        assert not registrar.is_alive()
